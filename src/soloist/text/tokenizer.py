"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Vocabulary
from tokenizers.processors import TemplateProcessing

from soloist.errors import UserError
from soloist.text.chat import ChatTemplates
from soloist.text.detokenize import Detokenizer, Pieces
from soloist.text.source import TokenizerSource


class Tokenizer:
    """A checkpoint's tokenizer and chat templates.   Raises: UserError if the source is damaged."""

    def __init__(self, source: TokenizerSource):
        self._source = source
        try:
            self._vocabulary = Vocabulary.from_buffer(source.json.encode())
        except ValueError as damage:
            raise UserError(f"{source.origin}: is no tokenizer ({damage}); download the file again") from None
        # Lengths belong to the request: a tokenizer that was saved with limits must not cut or fill up a prompt.
        self._vocabulary.no_truncation()
        self._vocabulary.no_padding()
        self._begin_as_set()
        self._pieces = Pieces(self._vocabulary, source.origin)

    @property
    def vocab_size(self) -> int:
        """Tokens, with added ones. The model's head may have more rows."""
        return self._vocabulary.get_vocab_size()

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token`, ... -> its text."""
        return self._source.special_tokens

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the markers that are hidden in decoded text."""
        return frozenset(i for i, added in self._vocabulary.get_added_tokens_decoder().items() if added.special)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._source.chat_templates)

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads beside what it is always given."""
        return self._chat.variables

    @property
    def chat_template(self) -> str:
        """The text of the usual template, or of the only one; empty without any."""
        templates = self._source.chat_templates
        return templates.get("default") or next(iter(templates.values()), "")

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes before an answer; empty if that cannot be told apart."""
        asked = [{"role": "user", "content": "?"}]
        try:
            without, whole = self.render_chat(asked, add_generation_prompt=False), self.render_chat(asked)
        except UserError:
            return ""
        return whole[len(without) :] if whole.startswith(without) else ""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. add_special: put BOS or EOS around it where the model's own tokenizer does.

        Raises: UserError for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            found = f"U+{ord(text[broken.start]):04X} at character {broken.start}"
            raise UserError(f"the text holds half of a character ({found}); give valid Unicode") from None
        return self._vocabulary.encode(text, add_special_tokens=add_special).ids

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids; ids without a token are skipped. Bytes that make no character become U+FFFD."""
        detokenizer = self.detokenizer(skip_special)
        return "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """For text that arrives token by token."""
        return Detokenizer(self._pieces, skip_special)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None beyond the vocabulary."""
        return self._vocabulary.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def token_id(self, token: str) -> int | None:
        return self._vocabulary.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's part of a text, as in the middle of one; empty beyond the vocabulary."""
        return self._pieces.of(token_id, first=False, skip_special=False) or b""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's template makes of a conversation. It holds all special tokens already.

        Args: variables: what else the template knows, such as enable_thinking.
        Raises: UserError without a template, for messages of no known form, and for what the template refuses.
        """
        return self._chat.render(messages, add_generation_prompt, tools, **variables)

    @cached_property
    def _chat(self) -> ChatTemplates:
        return ChatTemplates(self._source.chat_templates, self._source.special_tokens, self._source.origin)

    def _begin_as_set(self) -> None:
        """Settings beside tokenizer.json go before it, as in transformers."""
        add_bos, bos = self._source.add_bos, self._source.special_tokens.get("bos_token")
        bos_id = None if bos is None else self._vocabulary.token_to_id(bos)
        frame = self._vocabulary.encode("").ids
        if add_bos is None or bos_id is None or (bos_id in frame) == add_bos:
            return
        before, after = [bos_id] if add_bos else [], [i for i in frame if i != bos_id]
        names = {i: self._vocabulary.id_to_token(i) for i in before + after}
        around = [names[i] for i in before] + ["$A"] + [names[i] for i in after]
        self._vocabulary.post_processor = TemplateProcessing(
            single=around, special_tokens=[(name, i) for i, name in names.items()]
        )


def load_tokenizer(source: TokenizerSource | None) -> Tokenizer | None:
    """None for a checkpoint without a tokenizer, whose prompts are token ids."""
    return None if source is None else Tokenizer(source)
