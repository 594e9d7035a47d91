"""GGUF files: the values of the library, the names and settings of Hugging Face, and a clear refusal of the rest."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Type  # noqa: E402
from gguf import quants  # noqa: E402

from soloist.errors import UserError  # noqa: E402
from soloist.models.registry import load_decoder, read_config  # noqa: E402
from soloist.weights.checkpoint import open_checkpoint  # noqa: E402
from soloist.weights.gguf_file import halves_from_pairs, hf_name  # noqa: E402
from soloist.weights.gguf_header import read_header  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 256, 4, 2, 64, 256, 64


def tensors(tied: bool = True, layers: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)} | ({} if tied else {"output": (VOCAB, HIDDEN)})
    for i in range(layers):
        block = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM), "ffn_gate": (MLP, HIDDEN), "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    values: dict[str, torch.Tensor],
    kind: Type = Type.F32,
    arch: str = "llama",
    settings: dict[str, Any] | None = None,
) -> Path:
    """A one-layer file; matrices are stored as `kind`. Settings are added last, None removes one."""
    writer = gguf.GGUFWriter(path, arch)
    known: dict[str, Any] = {
        "block_count": 1, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": MLP,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e5, **(settings or {}),
    }  # fmt: skip
    for key, value in known.items():
        if value is None:
            continue
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"{arch}.{key}", value)
    for name, tensor in values.items():
        stored = Type.F32 if tensor.dim() == 1 else kind
        writer.add_tensor(name, quants.quantize(tensor.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fault(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def super_blocks(kind: Type, rows: int) -> torch.Tensor:
    """Rows of 512 random values in a type that the library reads but does not write: random bytes, sane scales."""
    block = gguf.GGML_QUANT_SIZES[kind][1]
    stored = torch.randint(256, (rows, 2, block), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (block - 2,)}[kind]
    for at in scales:
        stored[..., at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return stored.view(rows, 2 * block)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_values_are_those_of_the_library(tmp_path: Path, kind: Type) -> None:
    values = tensors()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", values, kind))
    for name in ("ffn_up", "ffn_down", "attn_v"):
        source = values[f"blk.0.{name}.weight"]
        expected = torch.from_numpy(quants.dequantize(quants.quantize(source.numpy(), kind), kind).copy())
        found = checkpoint.read(hf_name(f"blk.0.{name}.weight"))
        assert torch.equal(found.float(), expected.view(source.shape))
        assert kind == Type.F32 or not torch.equal(found.float(), source)


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_super_blocks_are_those_of_the_library(tmp_path: Path, kind: Type) -> None:
    rows = super_blocks(kind, 40)
    values = tensors()
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", values["token_embd.weight"].numpy())
    writer.add_tensor("blk.0.ffn_up.weight", rows.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight")
    assert found.shape == (40, 512) and found.isfinite().all() and found.std() > 0
    assert torch.equal(found, torch.from_numpy(quants.dequantize(rows.numpy(), kind)))


def test_chunks_of_rows_do_not_change_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors(), Type.Q4_0))
    whole = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    monkeypatch.setattr("soloist.weights.gguf_file.CHUNK_BYTES", 1000)
    assert torch.equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), whole)


def rotate(x: torch.Tensor, left: slice, right: slice, angle: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[..., left] = x[..., left] * angle.cos() - x[..., right] * angle.sin()
    out[..., right] = x[..., right] * angle.cos() + x[..., left] * angle.sin()
    return out


def test_rotating_halves_of_unpermuted_rows_is_rotating_pairs_of_stored_rows() -> None:
    rows, angle = torch.randn(HEADS * HEAD_DIM), torch.randn(HEAD_DIM // 2)
    half = HEAD_DIM // 2
    pairs = rotate(rows.view(HEADS, HEAD_DIM), slice(0, None, 2), slice(1, None, 2), angle)
    halves = rotate(halves_from_pairs(rows, HEADS).view(HEADS, HEAD_DIM), slice(0, half), slice(half, None), angle)
    assert torch.equal(halves_from_pairs(pairs.reshape(-1), HEADS).view(HEADS, HEAD_DIM), halves)
    wrong = rotate(rows.view(HEADS, HEAD_DIM), slice(0, half), slice(half, None), angle)
    assert not torch.allclose(wrong, halves)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_only_llama_stores_q_and_k_in_pairs(tmp_path: Path, arch: str) -> None:
    values = tensors()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", values, arch=arch))
    for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", None)):
        stored = values[f"blk.0.attn_{part}.weight"]
        expected = halves_from_pairs(stored, heads) if heads and arch == "llama" else stored
        assert torch.equal(checkpoint.read(f"model.layers.0.self_attn.{part}_proj.weight"), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_without_a_head_is_tied(tmp_path: Path, tied: bool) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors(tied), Type.Q8_0))
    assert checkpoint.config["tie_word_embeddings"] is tied
    config = read_config(checkpoint.config)
    assert (config.norm_eps, config.vocab_size, config.max_positions) == (1e-5, VOCAB, 128)
    load_decoder(checkpoint, config, torch.float32, torch.device("cpu"))


def test_rope_factors_become_settings(tmp_path: Path) -> None:
    factors = torch.linspace(1, 8, HEAD_DIM // 2)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors() | {"rope_freqs.weight": factors}))
    assert not any("rope" in name for name in checkpoint.tensors)
    assert read_config(checkpoint.config).blocks[0].mixer.rope.freq_factors == tuple(factors.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
             "original_max_position_embeddings": 32},
        ),
    ],
)  # fmt: skip
def test_rope_scaling_is_translated(tmp_path: Path, settings: dict[str, Any], expected: Any) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors(), settings=settings))
    assert checkpoint.config.get("rope_scaling") == expected
    read_config(checkpoint.config)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"wonder": 1}, "llama.wonder=1"),
        ({"expert_count": 8}, "expert_count=8"),
        ({"rope.dimension_count": 32}, "rope.dimension_count=32"),
        ({"block_count": None}, "lack llama.block_count"),
        ({"attention.head_count": [4, 2]}, "head_count=[4, 2]"),
        ({"rope.scaling.type": "longrope"}, "supported are none, linear, yarn"),
    ],
)
def test_settings_that_change_the_model_are_refused(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    assert reason in fault(write_gguf(tmp_path / "m.gguf", tensors(), settings=settings))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    assert "'gemma3'" in fault(write_gguf(tmp_path / "m.gguf", tensors(), arch="gemma3"))


def test_unreadable_types_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, kind in (("a.weight", Type.Q2_K), ("b.weight", Type.IQ4_NL)):
        values, block = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, torch.zeros(1, 256 // values * block, dtype=torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = fault(path)
    assert "a.weight is stored as Q2_K" in message and "b.weight is stored as IQ4_NL" in message


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "is empty"),
        (b"<html>", "is not a GGUF file"),
        (b"GGUF", "is truncated"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "truncated or damaged"),
    ],
)
def test_what_is_no_gguf_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert reason in fault(tmp_path / "m.gguf")


def test_a_cut_at_any_place_is_found(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", tensors(), Type.Q4_0)
    data = whole.read_bytes()
    last = max(i.offset + i.bytes for i in read_header(whole).tensors.values())
    for size in [*range(0, last, last // 50), last - 1]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        fault(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(data[:last])
    assert open_checkpoint(tmp_path / "cut.gguf").tensors


def test_a_missing_library_is_named_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install soloist[gguf]" in fault(path)


def test_every_end_id_of_the_file_ends_a_text(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors())
    assert open_checkpoint(path).eos_token_ids == ()
    from soloist.weights.gguf_config import end_ids

    ids = {"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 2}
    assert end_ids({f"tokenizer.ggml.{key}": value for key, value in ids.items()}) == (2, 5)


def test_names_are_json_safe(tmp_path: Path) -> None:
    json.dumps(open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors())).config)
