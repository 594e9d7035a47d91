"""What goes into the corpus, what stays out, and that nothing held out is trained on."""

from __future__ import annotations

import json
import re

import pytest

from soloist.errors import UserError
from soloist.train.baselines import compressed_bits, ngram_bits
from soloist.train.corpus import Page, build_pages, held_out, html_text, write_pages
from soloist.train.instruct import chat_pages
from soloist.train.puzzles import json_tasks, maths_tasks
from soloist.train.sources import SOURCES, Source, licence_of

SOURCE = Source("made-up-doc", "html", "MIT")


def _write(folder, texts):
    root = folder / SOURCE.name
    root.mkdir(parents=True)
    for index, body in enumerate(texts):
        (root / f"{index}.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def _paragraph(index: int) -> str:
    return f"<p>Page {index} says something that no other page says about the number {index * index} and its friends.</p>"


def test_html_keeps_text_and_code_and_drops_the_rest():
    text = html_text("<h2>Title</h2><script>x()</script><p>One  &amp; two</p><pre>a\n  b</pre><nav>menu</nav>")
    assert text == "## Title\n\nOne & two\n\na\n  b"


def test_a_paragraph_is_kept_once_in_the_whole_corpus(tmp_path):
    shared = "<p>" + "This licence text stands at the end of every page of the manual. " * 5 + "</p>"
    bodies = [_paragraph(i) * 1 + "".join(_paragraph(100 * i + j) for j in range(1, 5)) + shared for i in range(1, 6)]
    pages = build_pages(_write(tmp_path, bodies), (SOURCE,))
    assert len(pages) == 5
    assert sum("This licence text" in page.text for page in pages) == 1


def test_the_split_is_a_property_of_the_text():
    texts = [f"some page number {i}" for i in range(5000)]
    share = sum(map(held_out, texts)) / len(texts)
    assert 0.01 < share < 0.03
    assert [held_out(t) for t in texts] == [held_out(t) for t in texts]


def test_a_conversation_has_the_split_of_the_page_it_quotes(tmp_path):
    body = "The cache keeps what was read before so that it need not be read again, which saves a good deal of time."
    pages = [
        Page("sqlite3-doc", "docs", f"# Title of {kind} page\n\n{kind} {body}", held)
        for kind, held in (("hidden", True), ("open", False))
    ]
    made = [p for p in chat_pages(pages, tmp_path, puzzles=50) if p.source == "sections"]
    assert {("hidden The cache" in p.text, p.held_out) for p in made} == {(True, True), (False, False)}


def test_every_source_has_a_licence(tmp_path):
    assert all(licence_of(source.name) for source in SOURCES)
    with pytest.raises(KeyError):
        licence_of("a package nobody listed")
    write_pages([Page("stdlib", "code", "x = 1", False)], tmp_path)
    assert json.loads((tmp_path / "corpus.json").read_text())["sources"]["stdlib"]["licence"] == "PSF-2.0"


def test_no_documentation_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no documentation found"):
        build_pages(tmp_path, (SOURCE,))


def test_the_answers_of_the_tasks_are_right():
    for question, answer in maths_tasks(300, seed=3):
        for left, right in re.findall(r"((?:\d+ [-+*] )+\d+) = (\d+)", answer):
            assert eval(left) == int(right), (question, answer)
    for _, answer in json_tasks(200, seed=3):
        json.loads(answer)


def test_an_ngram_model_predicts_what_it_has_seen_and_not_what_it_has_not():
    import numpy as np

    rng = np.random.default_rng(0)
    pattern = np.tile(rng.integers(0, 50, 37), 40)
    noise = rng.integers(0, 50, 400)
    known, unknown = ngram_bits(pattern, [pattern[:400], noise], 50)
    assert known / 400 < 1.0 < 4.0 < unknown / 400
    assert compressed_bits(b"abc" * 500)["xz"] < 8 * 1500
