"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for stop strings and lets all text through that cannot belong to one.

    The text is searched token by token. Of the stop strings that a token completes, the one that begins earliest
    counts; of those that begin at one place, the one listed first (as in vLLM and llama.cpp). A stop string is complete
    with its last character: with stops "ab" and "abc" the text never waits for a "c".

    Source: Knuth, Morris and Pratt, Fast pattern matching in strings (1977): each character costs O(1) amortised.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), f"empty stop string in {stops!r}"
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns: the text that is safe to show, and the stop string that was found, if any. Nothing follows it."""
        pending = self._held + text
        found: list[tuple[int, int]] = []
        for i, stop in enumerate(self._stops):
            end = self._advance(i, text)
            if end is not None:
                found.append((len(self._held) + end - len(stop), i))
        if found:
            begin, i = min(found)
            self._held = ""
            return pending[:begin], self._stops[i]
        keep = len(pending) - max(self._matched, default=0)
        self._held = pending[keep:]
        return pending[:keep], None

    def flush(self) -> str:
        """The text held back, when nothing can complete it any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, text: str) -> int | None:
        """Follow one stop string through new text; its end if it is complete."""
        stop, borders, matched = self._stops[i], self._borders[i], self._matched[i]
        for position, letter in enumerate(text):
            while matched and stop[matched] != letter:
                matched = borders[matched - 1]
            matched += stop[matched] == letter
            if matched == len(stop):
                return position + 1
        self._matched[i] = matched
        return None


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0] * len(text), 0
    for i in range(1, len(text)):
        while length and text[length] != text[i]:
            length = borders[length - 1]
        length += text[length] == text[i]
        borders[i] = length
    return borders
