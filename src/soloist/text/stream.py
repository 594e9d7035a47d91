"""The text of a request while its tokens arrive in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.text.stops import StopFinder
from soloist.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextEvent:
    """What a block of tokens brought. num_tokens_used: tokens of the block up to the one that completed `stop`.

    text: what may be shown; it ends before the stop string.
    """

    text: str
    num_tokens_used: int
    stop: str | None = None


class TextStream:
    """Detokenises a request and ends it at a stop string.

    Blocks are taken apart token by token, so text, stop and tokens used do not depend on how the tokens were grouped.
    The text of the first `min_tokens` tokens is not searched, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), min_tokens: int = 0):
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopFinder(stops)
        self._stopped = False
        self._unsearched = min_tokens

    def push(self, token_ids: Sequence[int]) -> TextEvent:
        assert not self._stopped, "tokens after a stop string"
        shown = []
        for used, token in enumerate(token_ids, 1):
            text, stop = self._detokenizer.push(token), None
            if self._unsearched:
                self._unsearched -= 1
            else:
                text, stop = self._stops.push(text)
            shown.append(text)
            if stop is not None:
                self._stopped = True
                return TextEvent("".join(shown), used, stop)
        return TextEvent("".join(shown), len(token_ids))

    def flush(self) -> str:
        """The text held back, once no token follows: unfinished characters, and the beginning of a stop string.

        What an unfinished character becomes is shown and not searched: the request has already ended otherwise.
        """
        return "" if self._stopped else self._stops.flush() + self._detokenizer.flush()
