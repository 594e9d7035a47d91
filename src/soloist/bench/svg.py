"""Charts as inline SVG: no script, no font, no file beside it. Colours come from the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from soloist.bench.view import Chart, Series, Strip, TimeLine, number

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 44
COLOURS = 6
"""Classes c0 to c5 of the style sheet; a seventh series begins anew."""

Scale = Callable[[float], float]


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from low to high, at most `most` + 1 of them."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def octaves(low: float, high: float, most: int = 7) -> list[float]:
    """Powers of two from at most low to at least high."""
    first, last = math.floor(math.log2(low)), max(math.ceil(math.log2(high)), math.floor(math.log2(low)) + 1)
    return [2.0**k for k in range(first, last + 1, max(1, math.ceil((last - first) / most)))]


def chart_svg(chart: Chart) -> str:
    points = [point for series in chart.series for point in series.points]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    bars = any(series.style == "bars" for series in chart.series)
    low_x, high_x = (min(xs) - 0.5, max(xs) + 0.5) if bars else _spread(min(xs), max(xs))
    high_y = chart.y_max or max(ys) * 1.05 or 1.0
    if chart.log_x:
        marks = octaves(min(xs), max(xs))
        low_x, high_x = min(marks[0], min(xs)), max(marks[-1], max(xs))
        x = _scale(math.log2(low_x), math.log2(high_x), LEFT, WIDTH - RIGHT)
        place: Scale = lambda value: x(math.log2(value))  # noqa: E731
    else:
        marks = [t for t in ticks(low_x, high_x) if not bars or t == int(t)]
        place = _scale(low_x, high_x, LEFT, WIDTH - RIGHT)
    height = _scale(0.0, high_y, HEIGHT - BOTTOM, TOP)
    body = [_axes(chart, [(place(m), _short(m)) for m in marks], [(height(t), number(t)) for t in ticks(0.0, high_y)])]
    for i, series in enumerate(chart.series):
        body.append(_series(series, i, len(chart.series), place, height))
    return _svg(WIDTH, HEIGHT, chart.title, body)


def time_line_svg(line: TimeLine, width: int = 860) -> str:
    """One row a variant, on one axis of time. The darkness of a bar is its number of tokens."""
    row, left, bottom = 34, 150, 40
    end = max(strip.blocks[-1][1] if strip.blocks else strip.ttft_ms for strip in line.strips)
    x = _scale(0.0, end, left, width - RIGHT)
    most = max((n or 1 for strip in line.strips for _, _, n in strip.blocks), default=1)
    height = row * len(line.strips) + bottom
    body = [_strip_svg(strip, 4 + row * i, row - 10, left, x, most) for i, strip in enumerate(line.strips)]
    base = row * len(line.strips) + 6
    for mark in ticks(0.0, end, 8):
        body.append(f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="0" y2="{base}"/>')
        body.append(f'<text x="{x(mark):.1f}" y="{base + 14}" text-anchor="middle">{number(mark)}</text>')
    body.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 6}" text-anchor="middle">ms since the request</text>')
    return _svg(width, height, line.title, body)


def _strip_svg(strip: Strip, top: float, height: float, left: float, x: Scale, most: int) -> str:
    name = f'<text x="{left - 8}" y="{top + height / 2 + 4:.1f}" text-anchor="end">{escape(strip.name)}</text>'
    parts = [name, f'<rect class="prefill" x="{x(0):.2f}" y="{top}" width="{x(strip.ttft_ms) - x(0):.2f}" height="{height}">'
             f"<title>prefill, {number(strip.ttft_ms)} ms</title></rect>"]  # fmt: skip
    for begin, end, n in strip.blocks:
        told = "unknown" if n is None else str(n)
        wide = max(x(end) - x(begin), 0.3)
        parts.append(
            f'<rect class="block" x="{x(begin):.2f}" y="{top}" width="{wide:.2f}" height="{height}" '
            f'fill-opacity="{0.2 + 0.8 * (n or 1) / most:.2f}"><title>{number(end - begin)} ms, tokens: {told}</title></rect>'
        )
    return "".join(parts)


def legend(chart: Chart) -> str:
    """Names beside their colours; HTML, so that long names wrap."""
    names = [f'<span><i class="c{s.place % COLOURS}"></i>{escape(s.name)}</span>' for s in chart.series]
    return f'<div class="legend">{"".join(names)}</div>'


def _series(series: Series, index: int, count: int, x: Scale, y: Scale) -> str:
    colour = f"c{series.place % COLOURS}"
    at = [(x(a), y(b)) for a, b in series.points]
    titles = [f"<title>{escape(series.name)}: {number(a)}, {number(b)}</title>" for a, b in series.points]
    if series.style == "bars":
        slot = (x(1.0) - x(0.0)) * 0.8
        wide = slot / count
        return "".join(
            f'<rect class="{colour}" x="{a - slot / 2 + index * wide:.1f}" y="{b:.1f}" width="{wide:.1f}" '
            f'height="{max(y(0.0) - b, 0):.1f}">{title}</rect>'
            for (a, b), title in zip(at, titles, strict=True)
        )
    dots = "".join(
        f'<circle class="{colour}" cx="{a:.1f}" cy="{b:.1f}" r="3" fill-opacity="0.8">{title}</circle>'
        for (a, b), title in zip(at, titles, strict=True)
    )
    if series.style == "dots":
        return dots
    path = _steps(at) if series.style == "steps" else at
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in path)
    return f'<polyline class="{colour}" points="{line}"/>' + (dots if series.style == "line" else "")


def _steps(at: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners between points whose value holds until the next one."""
    found = [at[0]]
    for (_, before), (a, b) in zip(at, at[1:], strict=False):
        found += [(a, before), (a, b)]
    return found


def _axes(chart: Chart, x_marks: list[tuple[float, str]], y_marks: list[tuple[float, str]]) -> str:
    base, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for y, text in y_marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for x, text in x_marks:
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{text}</text>')
    middle = (TOP + base) / 2
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{base}" y2="{base}"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    turned = f'transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {turned}>{escape(chart.y_label)}</text>')
    return "".join(parts)


def _svg(width: float, height: float, title: str, body: list[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _spread(low: float, high: float) -> tuple[float, float]:
    """A little room at both ends, so that no point lies on the frame."""
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _short(value: float) -> str:
    """Contexts are powers of two: 8192 is 8k."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else number(value) if value % 1 else f"{value:g}"
