"""The tokenizer that comes with a checkpoint: from the files of a folder, or from the metadata of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soloist.errors import UserError
from soloist.text.source import TokenizerSource
from soloist.weights.gguf_vocabulary import tokenizer_json
from soloist.weights.json_file import read_object, read_object_if_any, read_text

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def folder_source(path: Path) -> TokenizerSource | None:
    """None for a folder without tokenizer.json: its model takes token ids only."""
    if not (path / "tokenizer.json").exists():
        return None
    settings = read_object_if_any(path / "special_tokens_map.json") | read_object_if_any(path / "tokenizer_config.json")
    return TokenizerSource(
        json=read_text(path / "tokenizer.json"),
        origin=str(path / "tokenizer.json"),
        chat_templates=_folder_templates(path, settings),
        special_tokens={name: text for name in SPECIAL if (text := _text_of(settings.get(name)))},
        add_bos=_flag(path, settings, "add_bos_token"),
    )


def _flag(path: Path, settings: dict[str, Any], name: str) -> bool | None:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{path / 'tokenizer_config.json'}: {name} is {value!r}; write true or false")
    return value


def folder_eos(path: Path, source: TokenizerSource | None) -> int | None:
    """The id of the tokenizer's own end token.   Raises: UserError if tokenizer.json is damaged or lacks the token."""
    if source is None:
        return None
    tokenizer = read_object(path / "tokenizer.json")
    name = source.special_tokens.get("eos_token")
    if name is None:
        return None
    for token in tokenizer.get("added_tokens") or ():
        if token.get("content") == name:
            return int(token["id"])
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    token_id = vocabulary.get(name) if isinstance(vocabulary, dict) else None
    if token_id is None:
        raise UserError(f"{path / 'tokenizer.json'}: lacks the eos_token {name!r} that tokenizer_config.json names")
    return int(token_id)


def _folder_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Files go before tokenizer_config.json, as in transformers."""
    files = {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").exists():
        files["default"] = path / "chat_template.jinja"
    if files:
        return {name: read_text(file) for name, file in files.items()}
    stored = settings.get("chat_template")
    if stored is None:
        stored = read_object_if_any(path / "chat_template.json").get("chat_template")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
    found = {"default": stored} if isinstance(stored, str) else stored or {}
    if not isinstance(found, dict) or not all(isinstance(t, str) for pair in found.items() for t in pair):
        raise UserError(
            f"{path}: chat_template is neither text nor a list of named texts; repair tokenizer_config.json"
        )
    return found


def _text_of(token: Any) -> str | None:
    """Special tokens are written as text or as `{"content": text, ...}`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def gguf_source(path: Path, metadata: dict[str, Any]) -> TokenizerSource | None:
    """None for a file without a vocabulary."""
    text = tokenizer_json(path, metadata)
    if text is None:
        return None
    prefix = "tokenizer.chat_template"
    templates = {key.removeprefix(f"{prefix}."): t for key, t in metadata.items() if key.startswith(f"{prefix}.")}
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_id") for name in SPECIAL}
    special = {name: tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    return TokenizerSource(text, str(path), templates, special)
