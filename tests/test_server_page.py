"""The chat page in a real browser: it sends a message, shows the stream, and draws one bar a round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
from tests.browser import CHROMIUM, Browser
from tests.llms import nano
from tests.serving import serving

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with serving(nano("mtp", 3), "nano") as server:
        browser = Browser(tmp_path / "browser")
        try:
            browser.call("Page.navigate", url=server.url)
            browser.until("document.readyState === 'complete' && !!document.getElementById('form')")
            yield browser
        finally:
            browser.close()


def test_a_message_is_answered_with_its_rates_and_rounds(page: Browser) -> None:
    page.until("document.getElementById('model').textContent.includes('1024 tokens of context')")
    assert not page.evaluate("!!document.querySelector('.strip i')")
    page.evaluate(
        "document.getElementById('limit').value = 40; document.getElementById('text').value = 'Hello';"
        "document.getElementById('form').requestSubmit()"
    )
    page.until("document.querySelector('.stats')?.textContent.includes('ended by')")
    stats = page.evaluate("document.querySelector('.stats').textContent")
    assert "tok/s" in stats and "tokens a round" in stats
    assert page.evaluate("document.querySelector('.body').textContent.length") > 0
    assert page.evaluate("document.querySelectorAll('.strip i').length") > 0
    assert page.evaluate("document.querySelectorAll('.error').length") == 0
