"""Byte-level BPE with Ling's pre-tokenizer and special-token names, and the files that go with it.

The special tokens sit at the end of the vocabulary, as in the public checkpoints. No BOS or EOS is added to a text.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from soloist.errors import UserError
from soloist.train.corpus import Page

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Ling's pre-tokenizer: contractions, letter runs, single digits, punctuation runs, line ends, spaces.
LING_PATTERN = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

END_OF_TEXT = "<|endoftext|>"
ROLE_END = "<|role_end|>"
MASK = "<|mask|>"
# (token, is it hidden when special tokens are skipped)
SPECIAL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<|startoftext|>", True),
    (END_OF_TEXT, True),
    ("<role>", True),
    ("</role>", True),
    (ROLE_END, True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<arg_key>", False),
    ("</arg_key>", False),
    ("<arg_value>", False),
    ("</arg_value>", False),
    ("<think>", False),
    ("</think>", False),
    (MASK, True),
)

CHAT_TEMPLATE = """\
{%- set thinking = false -%}
{%- if enable_thinking is defined and enable_thinking -%}{%- set thinking = true -%}{%- endif -%}
{%- if thinking_option is defined -%}{%- set thinking = (thinking_option == 'on') -%}{%- endif -%}
{%- set switch = 'detailed thinking on' if thinking else 'detailed thinking off' -%}
{{- '<role>SYSTEM</role>' -}}
{%- if messages and messages[0].role == 'system' -%}
{{- messages[0].content + '\\n' -}}
{%- endif -%}
{%- if tools -%}
{{- '# Tools\\n\\nYou may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- '</tools>\\nA call is written as
<tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>\\n' -}}
{%- endif -%}
{{- switch + '<|role_end|>' -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<role>HUMAN</role>' + message.content + '<|role_end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<role>ASSISTANT</role>\\n<think>' + (message.reasoning_content or '') + '</think>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '<tool_call>' + call.name + '\\n' -}}
{%- for key, value in call.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) +
'</arg_value>\\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|role_end|>' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{- '<role>OBSERVATION</role>' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|role_end|>' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<role>ASSISTANT</role>\\n<think>' + ('' if thinking else '</think>') -}}
{%- endif -%}
"""


def train_tokenizer(pages: list[Page], vocab_size: int = 8192, sample_bytes: int = 40_000_000, seed: int = 0) -> Tokenizer:
    """Train a byte-level BPE on a sample of the pages. Special tokens take the last ids of `vocab_size`.

    Raises: UserError where the text has too few distinct pairs for that many tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LING_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    pages = list(pages)
    random.Random(seed).shuffle(pages)
    texts, used = [], 0
    for page in pages:
        text = page.text
        for token, _ in SPECIAL_TOKENS:
            text = text.replace(token, "\n") if token in text else text
        texts.append(text)
        used += len(text)
        if used >= sample_bytes:
            break
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size - len(SPECIAL_TOKENS):
        raise UserError(
            f"the text gives only {tokenizer.get_vocab_size()} tokens, {vocab_size} were asked for; "
            "use more text or a smaller vocabulary"
        )
    tokenizer.add_tokens([AddedToken(token, special=hidden, normalized=False) for token, hidden in SPECIAL_TOKENS])
    assert tokenizer.token_to_id(MASK) == vocab_size - 1, (tokenizer.token_to_id(MASK), vocab_size)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": hidden,
        }
        for token, hidden in SPECIAL_TOKENS
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": ROLE_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a special token. Raises: UserError where the tokenizer has none."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise UserError(f"the tokenizer has no token {token}; training needs a folder that train nano wrote")
    return int(found)


def encode_pages(tokenizer: Tokenizer, pages: list[Page]) -> list[list[int]]:
    """Token ids of every page, each ended by the end-of-text token."""
    end = token_id(tokenizer, END_OF_TEXT)
    out: list[list[int]] = []
    for start in range(0, len(pages), 512):
        batch = tokenizer.encode_batch_fast([page.text for page in pages[start : start + 512]], add_special_tokens=False)
        out += [[*encoding.ids, end] for encoding in batch]
    return out
