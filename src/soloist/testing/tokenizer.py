"""A tiny byte-level BPE tokenizer with a ChatML template, trained on the sentences below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
"""The special tokens, 256 bytes, and merges for the rest."""

SENTENCES = (
    "The lighthouse keeper counts the waves and writes the number in a small blue book.",
    "Every morning the baker opens the door, and the street smells of bread and rain.",
    "A number is even if it can be divided by two without a remainder.",
    "She asked the old man where the river begins, and he pointed at the mountains.",
    "Water boils at one hundred degrees, but high in the mountains it boils earlier.",
    "The train leaves at seven, so we should be at the station before the rain begins.",
    "Write a function that returns the sum of all even numbers in a list.",
    "def total(numbers):\n    return sum(number for number in numbers if number % 2 == 0)",
    "Das Schiff fährt über den Fluss, und die Möwen folgen ihm bis zum Meer.",
    "Où est la gare ? Elle est près de la rivière, à côté du café.",
)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json.

    Returns: the fields of config.json that belong to it: vocabulary size and special ids. <|im_end|> ends an answer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    ids = {f"{name}_token_id": tokenizer.token_to_id(settings[f"{name}_token"]) for name in ("bos", "eos", "pad")}
    return {"vocab_size": tokenizer.get_vocab_size(), **ids}
