"""A report of runs: one HTML file that needs nothing beside it, Markdown, or a PNG of the charts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from soloist.bench.files import read_run
from soloist.bench.records import RunFile
from soloist.bench.svg import chart_svg, legend, time_line_svg
from soloist.bench.transfer import Transfer, transfers
from soloist.bench.view import (
    Chart,
    Section,
    Table,
    TimeLine,
    section,
    transfer_sentence,
    transfer_table,
    varied_axes,
)
from soloist.errors import UserError

WARNING = (
    "A number belongs to its workload. Acceptance moves with the text, time per token with the context; a plan that takes "
    "one number from one workload to another is wrong by as much as these tables spread."
)


def write_report(
    sources: Sequence[Path], *, html: Path | None = None, markdown: Path | None = None, png: Path | None = None
) -> str:
    """Read runs and write every report that has a path.   Returns: the Markdown, for a terminal.

    Raises: UserError for a file that is no run, nowhere to write, or a PNG without matplotlib.
    """
    if not sources:
        raise UserError("no run to report; give files that `soloist bench run --output` wrote")
    runs = [read_run(source) for source in sources]
    sections, carried = [section(run) for run in runs], transfers(runs)
    text = to_markdown(sections, carried)
    if markdown is not None:
        _write(markdown, text)
    if html is not None:
        _write(html, to_html(sections, carried))
    if png is not None:
        from soloist.bench.figure import write_png

        write_png([chart for each in sections for chart in each.charts], png, heading(runs, sections))
    return text


def heading(runs: Sequence[RunFile], sections: Sequence[Section]) -> str:
    """What a picture that travels without its report must still say."""
    titles = [f"{s.title}: {s.subtitle}" for s in sections]
    alarms = [label for s in sections for label in s.labels]
    return "\n".join([*titles, *alarms])


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


# ---- Markdown --------------------------------------------------------------------------------------------------------


def to_markdown(sections: Sequence[Section], carried: Sequence[Transfer]) -> str:
    parts = []
    for each in sections:
        parts += [f"# {each.title}", each.subtitle]
        parts += [f"> **{label}**" for label in each.labels]
        parts += [_markdown_table(table) for table in each.tables]
        parts += ["\n".join(f"- {sentence}" for sentence in each.sentences)] if each.sentences else []
    parts += ["# How far these numbers carry", WARNING]
    for transfer in carried:
        parts.append(f"**{transfer_sentence(transfer)}**")
        parts += [_markdown_table(transfer_table(transfer, axis)) for axis in varied_axes(transfer)]
    for each in sections:
        parts += [f"# Details of {each.title}", *map(_markdown_table, each.details)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = "|---|" + ("---:|" if table.numeric else "---|") * (len(table.header) - 1)
    rows = [line(table.header), rule, *map(line, table.rows)]
    return "\n".join([f"## {table.title}", "", *rows, *(["", table.note] if table.note else [])])


# ---- HTML ------------------------------------------------------------------------------------------------------------


def to_html(sections: Sequence[Section], carried: Sequence[Transfer]) -> str:
    style = (files("soloist.bench") / "report.css").read_text()
    names = ", ".join(each.title for each in sections)
    body = [*map(_section_html, sections), _transfer_html(carried), *map(_details_html, sections)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>soloist bench: {escape(names)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _section_html(each: Section) -> str:
    labels = "".join(f"<li>{escape(label)}</li>" for label in each.labels)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in each.sentences)
    charts = "".join(_chart_html(chart) for chart in each.charts)
    return (
        f"<section><h1>{escape(each.title)}</h1><p class=subtitle>{escape(each.subtitle)}</p>"
        + (f"<ul class=labels>{labels}</ul>" if labels else "")
        + "".join(map(_table_html, each.tables))
        + (f"<ul>{sentences}</ul>" if sentences else "")
        + f"<div class=charts>{charts}</div></section>\n"
    )


def _chart_html(chart: Chart | TimeLine) -> str:
    note = f"<p class=note>{escape(chart.note)}</p>" if chart.note else ""
    if isinstance(chart, TimeLine):
        return f"<figure class=wide><figcaption>{escape(chart.title)}</figcaption>{time_line_svg(chart)}{note}</figure>"
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{chart_svg(chart)}{legend(chart)}{note}</figure>"


def _transfer_html(carried: Sequence[Transfer]) -> str:
    parts = ["<section><h1>How far these numbers carry</h1>", f"<p>{escape(WARNING)}</p>"]
    for transfer in carried:
        parts.append(f"<p class=range>{escape(transfer_sentence(transfer))}</p>")
        parts += [_table_html(transfer_table(transfer, axis)) for axis in varied_axes(transfer)]
    return "".join([*parts, "</section>\n"])


def _details_html(each: Section) -> str:
    tables = "".join(
        f"<details><summary>{escape(table.title)}</summary>{_table_html(table, False)}</details>" for table in each.details
    )
    return f"<section><h1>Details of {escape(each.title)}</h1>{tables}</section>\n"


def _table_html(table: Table, titled: bool = True) -> str:
    kind = "numeric" if table.numeric else "words"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.header) else ""
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    title = f"<h2>{escape(table.title)}</h2>" if titled else ""
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    return f"{title}<div class=scroll><table class={kind}>{head}<tbody>{rows}</tbody></table></div>{note}"
