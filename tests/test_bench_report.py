"""Reports: what makes a number mean less stands beside it, in every form; the page is drawn by a real browser, offline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.bench.files import request_lines, rounds_path
from soloist.bench.records import Block, RequestRecord, RunFile, Variant
from soloist.bench.report import write_report
from soloist.cli import main
from tests.bench_runs import CARD, noisy_requests, run_of
from tests.browser import CHROMIUM, Browser

DEMO = Path(__file__).parents[1] / "benchmarks" / "runs" / "demo-cpu.json"


def with_rounds(request: RequestRecord) -> RequestRecord:
    """As many blocks as tokens, each a round of three drafts of which none is right."""
    times = [50.0 + i * (request.last_ms - 50.0) / 15 for i in range(16)]  # type: ignore[operator]
    drafted = None if request.variant == "plain" else 3
    return dataclasses.replace(request, blocks=tuple(Block(t, 1, drafted, 0 if drafted else None, 9.0) for t in times))


def written(run: RunFile, path: Path) -> Path:
    run.write(path)
    rounds_path(path).write_text("".join(line for i, r in enumerate(run.requests) for line in request_lines(i, r)))
    return path


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """Its second variant is pinned, its text wrong; and it was ended early."""
    variants = (CARD.variants[0], Variant("other", "scripted", 3, "pinned", 2.0))
    requests = tuple(
        dataclasses.replace(with_rounds(r), text_same=r.variant == "plain") for r in noisy_requests(1)
    )  # fmt: skip
    run = run_of(requests, dataclasses.replace(CARD, variants=variants))
    return written(dataclasses.replace(run, passed=False, partial=True), tmp_path / "faulty.json")


def cells(text: str, name: str) -> list[str]:
    return [line for line in re.split(r"\n|<tr>", text) if name in line]


def test_every_form_says_what_a_number_must_not_be_quoted_without(faulty: Path, tmp_path: Path) -> None:
    html, markdown = tmp_path / "x.html", tmp_path / "x.md"
    assert write_report([faulty], html=html, markdown=markdown) == markdown.read_text()
    for text in (html.read_text(), markdown.read_text()):
        for words in ("FAILED: a check did not pass", "PARTIAL", "SYNTHETIC ACCEPTANCE in other", "failed: the text differs"):
            assert words in text
        rows = cells(text, "chat, other")
        assert rows and all("synthetic, FAILED" in row and "x [" not in row for row in rows)
        assert all("synthetic" not in row for row in cells(text, "chat, plain"))


def test_a_range_is_given_for_planning_and_none_where_it_would_mislead(faulty: Path, tmp_path: Path) -> None:
    sound = written(run_of(tuple(map(with_rounds, noisy_requests(2)))), tmp_path / "sound.json")
    text = write_report([sound])
    assert "plan with a TPOT from" in text and "not with one number" in text
    assert "Nothing is known of other values" in text and "depth does" in text
    assert "no range, because its acceptance is synthetic" in write_report([faulty])


def test_a_share_of_the_limit_is_in_the_headline() -> None:
    text = write_report([DEMO])
    assert "of the limit" in text and re.search(r"plain \|.*\d+ ?%", text)


def test_the_picture_needs_matplotlib_and_is_a_png(faulty: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_report([faulty], png=tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    card = dataclasses.replace(CARD, model="<script>alert(1)</script>")
    write_report([written(run_of(noisy_requests(3), card), tmp_path / "a.json")], html=tmp_path / "x.html")
    assert "<script" not in (tmp_path / "x.html").read_text()


# ---- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


def shown(browser: Browser, path: Path, width: int) -> Browser:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.call("Page.navigate", url=path.as_uri())
    browser.until(f"document.readyState === 'complete' && location.href === '{path.as_uri()}'")
    return browser


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_drawn_whole_and_fetches_nothing(browser: Browser, faulty: Path, tmp_path: Path, width: int) -> None:
    html = tmp_path / "x.html"
    assert main(["bench", "report", str(faulty), str(DEMO), "--html", str(html)]) == 0
    page = shown(browser, html, width)
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('section h1').length") == 5
    drawn = "[...document.querySelectorAll('figure svg')].map(svg => svg.getBBox()).filter(box => box.width > 100).length"
    assert page.evaluate(drawn) == page.evaluate("document.querySelectorAll('figure').length") >= 4
    outside = """[...document.querySelectorAll('figure svg text')].filter(text => {
        const own = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
        return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1;
    }).map(text => text.textContent).join()"""
    assert page.evaluate(outside) == ""
    lines = "[...document.querySelectorAll('polyline')].map(line => getComputedStyle(line).fill)"
    assert page.evaluate(f"{lines}.length") > 2 and page.evaluate(f"{lines}.every(fill => fill === 'none')")
    red = "getComputedStyle(document.querySelector('.labels li')).color"
    assert page.evaluate(red) != page.evaluate("getComputedStyle(document.body).color")
    assert "FAILED: a check did not pass" in page.evaluate("document.body.innerText")


def test_a_variant_has_one_colour_in_all_charts(browser: Browser, tmp_path: Path) -> None:
    write_report([DEMO], html=tmp_path / "x.html")
    page = shown(browser, tmp_path / "x.html", 1280)
    pairs = """[...new Set([...document.querySelectorAll('.legend span')].map(
        each => each.textContent + ' ' + getComputedStyle(each.querySelector('i')).backgroundColor))]"""
    assert page.evaluate(f"{pairs}.length") == page.evaluate(f"new Set({pairs}.map(each => each.split(' ')[0])).size") == 4


def test_details_open_and_show_the_card(browser: Browser, tmp_path: Path) -> None:
    html = tmp_path / "x.html"
    write_report([DEMO], html=html)
    page = shown(browser, html, 1280)
    seen = "[...document.querySelectorAll('details td')].filter(cell => cell.offsetHeight > 0 && cell.checkVisibility()).length"
    assert page.evaluate(seen) == 0
    page.evaluate("document.querySelectorAll('details summary').forEach(each => each.click())")
    assert page.evaluate(seen) > 100 and "sha256:" in page.evaluate("document.body.innerText")
