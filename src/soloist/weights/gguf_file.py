"""GGUF files of the Llama and Qwen3 families, shown as a Hugging Face checkpoint.

Quantised blocks become fp32 when a tensor is read, by the `gguf` library. Names and settings are translated, and the
rows of q and k, which Llama files store in pairs for adjacent rotation, go back to halves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from soloist.dist.share import Cut
from soloist.errors import UserError
from soloist.weights.checkpoint import TensorInfo, cut, in_stored_order
from soloist.weights.gguf_config import end_ids, hf_config
from soloist.weights.gguf_header import read_header
from soloist.weights.shard import read_bytes
from soloist.weights.tokenizer_files import gguf_source

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

CHUNK_BYTES = 1 << 22
"""Stored bytes dequantised at once: the library works with several fp32 copies of what it is given."""

ROPE_FACTORS = "rope_freqs.weight"

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


class GgufFile:
    """See Checkpoint.   Raises: UserError for a file that is damaged, or of a kind we do not run."""

    def __init__(self, path: Path):
        self.path = path
        self._gguf = _library(path)
        header = read_header(path)
        stored = header.tensors
        self._factors = read_plain(stored[ROPE_FACTORS]) if ROPE_FACTORS in stored else None
        self.tensors = {hf_name(n): i for n, i in stored.items() if n != ROPE_FACTORS}
        factors = None if self._factors is None else self._factors.tolist()
        self.config = hf_config(path, header.metadata, self.tensors, factors)
        self.eos_token_ids = end_ids(header.metadata)
        self.generation_config: dict[str, Any] = {"eos_token_id": list(self.eos_token_ids)}
        self.tokenizer_source = gguf_source(path, header.metadata)

    def read(self, name: str, cuts: Sequence[Cut] = ()) -> torch.Tensor:
        return cut(self._whole(name), cuts)

    def _whole(self, name: str) -> torch.Tensor:
        info = self.tensors[name]
        values = read_plain(info) if info.dtype in PLAIN else self._dequantise(info)
        heads = self._permuted_heads(name)
        return values if heads is None else halves_from_pairs(values, heads)

    def _dequantise(self, info: TensorInfo) -> torch.Tensor:
        """[rows, columns] fp32, by chunks of rows."""
        kind = self._gguf.GGMLQuantizationType[info.dtype]
        num_rows = math.prod(info.shape[:-1])
        rows = read_bytes(info).view(num_rows, -1).numpy()
        values = torch.empty(num_rows, info.shape[-1])
        step = max(1, CHUNK_BYTES // rows.shape[1])
        for start in range(0, num_rows, step):
            chunk = self._gguf.quants.dequantize(rows[start : start + step], kind)
            values[start : start + step] = torch.from_numpy(chunk)
        return values.view(info.shape)

    def _permuted_heads(self, name: str) -> int | None:
        """Number of heads of a tensor whose rows are stored in pairs."""
        if self.config["model_type"] != "llama":
            return None
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else None

    def names_by_file(self) -> list[list[str]]:
        by_stored = {info.name: name for name, info in self.tensors.items()}
        stored = {info.name: info for info in self.tensors.values()}
        return [[by_stored[n] for n in names] for names in in_stored_order(stored)]

    def close(self) -> None:
        """Nothing is held open between reads."""


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; its own where we know none, so that the loader can name it as unexpected."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{IN_BLOCK[part]}.{kind}" if part in IN_BLOCK else name
    part, _, kind = name.rpartition(".")
    return f"{WHOLE[part]}.{kind}" if part in WHOLE else name


def halves_from_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the converter's permutation: row (pair i, half h) of every head goes to (half h, pair i).

    Rotating channels i and i + D/2 of the result is rotating channels 2i and 2i + 1 of the input.
    Args: rows [H * D, ...], weights or biases.
    """
    head_dim = rows.shape[0] // num_heads
    return rows.view(num_heads, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def read_plain(info: TensorInfo) -> torch.Tensor:
    return read_bytes(info).view(PLAIN[info.dtype]).view(info.shape)


def _library(path: Path) -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise UserError(f"{path}: reading GGUF needs the gguf library; run `pip install soloist[gguf]`") from error
    return gguf
