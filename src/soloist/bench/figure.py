"""The charts of a report as one PNG, for where no page can be shown. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soloist.bench.view import Chart, Series, TimeLine
from soloist.errors import UserError


def write_png(charts: Sequence[Chart | TimeLine], path: Path, heading: str) -> None:
    """Raises: UserError without matplotlib, without anything to draw, or where nothing can be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('a PNG needs matplotlib; pip install "soloist[train]", or write --html') from error
    if not charts:
        raise UserError(f"{path}: these runs have nothing to draw; write --html, which shows their tables")
    columns = min(3, len(charts))
    rows = math.ceil(len(charts) / columns)
    titles = heading.splitlines()
    head = 0.22 * len(titles) + 0.3
    figure = Figure(figsize=(5 * columns, 3.4 * rows + head), layout="constrained")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()  # matplotlib's types differ from release to release
    engine.set(rect=(0, 0, 1, 1 - head / (3.4 * rows + head)))
    figure.text(0.01, 0.995, "\n".join(titles), fontsize=9, va="top", ha="left")
    for index, chart in enumerate(charts, 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_title(chart.title, fontsize=10)
        if isinstance(chart, TimeLine):
            _draw_time_line(axes, chart)
        else:
            _draw(axes, chart)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _draw(axes: Any, chart: Chart) -> None:
    for index, series in enumerate(chart.series):
        _DRAWN[series.style](axes, series, index, len(chart.series))
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label, ylim=(0, chart.y_max))
    if chart.log_x:
        axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [x for x, _ in series.points], [y for _, y in series.points]


def _looks(series: Series) -> dict[str, str]:
    return {"label": series.name, "color": f"C{series.place}"}


def _draw_bars(axes: Any, series: Series, index: int, count: int) -> None:
    x, y = _columns(series)
    axes.bar([each - 0.4 + 0.8 * (index + 0.5) / count for each in x], y, 0.8 / count, **_looks(series))


_DRAWN: dict[str, Any] = {
    "dots": lambda axes, series, index, count: axes.plot(*_columns(series), "o", ms=3, alpha=0.7, **_looks(series)),
    "line": lambda axes, series, index, count: axes.plot(*_columns(series), "o-", ms=3, **_looks(series)),
    "steps": lambda axes, series, index, count: axes.step(*_columns(series), where="post", **_looks(series)),
    "bars": _draw_bars,
}


def _draw_time_line(axes: Any, line: TimeLine) -> None:
    most = max((n or 1 for strip in line.strips for _, _, n in strip.blocks), default=1)
    for row, strip in enumerate(line.strips):
        axes.barh(row, strip.ttft_ms, color="0.75")
        for begin, end, n in strip.blocks:
            axes.barh(row, end - begin, left=begin, color="tab:blue", alpha=0.2 + 0.8 * (n or 1) / most)
    axes.set_yticks(range(len(line.strips)), [strip.name for strip in line.strips], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms since the request; {line.note}")
