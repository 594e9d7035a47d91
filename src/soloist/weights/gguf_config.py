"""GGUF metadata as the config.json of the same model. Every setting of the architecture is read or refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from soloist.errors import UserError
from soloist.text.source import union_eos
from soloist.weights.checkpoint import TensorInfo

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_MISSING: Any = object()


def hf_config(
    path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], rope_factors: list[float] | None
) -> dict[str, Any]:
    """Args: tensors by Hugging Face name.   Raises: UserError for other architectures and unknown settings."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(f"{path}: has the architecture {arch!r}; GGUF is read for {', '.join(ARCHITECTURES)}")
    keys = _Keys(path, arch, metadata)
    heads = keys.whole("attention.head_count")
    hidden = keys.whole("embedding_length")
    head_dim = keys.whole("attention.key_length", hidden // heads)
    embedding = tensors.get("model.embed_tokens.weight")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": embedding.shape[0] if embedding else keys.whole("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.whole("context_length"),
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.take("rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "dtype": _dtype(tensors),
    }
    if arch == "llama":
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    keys.only("expert_count", 0)
    keys.only("expert_used_count", 0)
    scaling = _rope_scaling(keys)
    if rope_factors is not None and scaling:
        raise UserError(f"{path}: has both rope_freqs.weight and rope.scaling settings; only one of them is supported")
    config |= {"rope_scaling": scaling, "rope_freq_factors": rope_factors}
    keys.ignore("vocab_size", "tensor_data_layout")
    keys.finish()
    return {name: value for name, value in config.items() if value is not None}


def end_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, of a message or of a turn, in this order."""
    return union_eos(*(metadata.get(f"tokenizer.ggml.{key}") for key in EOS_KEYS))


def _dtype(tensors: dict[str, TensorInfo]) -> str:
    """What a GPU computes in: the stored type, bfloat16 for quantised weights (fp16 could overflow)."""
    kinds = {"F32": "float32", "F16": "float16"}
    largest = max(tensors.values(), key=lambda info: info.numel, default=None)
    return kinds.get(largest.dtype, "bfloat16") if largest else "float32"


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    """Source of the YaRN amplitude: llama.cpp multiplies `attn_factor` by 0.1 ln(factor) + 1."""
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", None) or keys.take("rope.scale_linear", None)
    original = keys.take("rope.scaling.original_context_length", None)
    keys.ignore("rope.scaling.finetuned", "rope.scale_linear")
    amplitude = keys.take("rope.scaling.attn_factor", None)
    if kind == "yarn":
        fast, slow = keys.take("rope.scaling.yarn_beta_fast", 32.0), keys.take("rope.scaling.yarn_beta_slow", 1.0)
        scaling = {"rope_type": kind, "factor": factor, "beta_fast": fast, "beta_slow": slow}
        if amplitude is not None and factor:
            scaling["attention_factor"] = amplitude * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
        return scaling | ({"original_max_position_embeddings": original} if original else {})
    if kind not in ("none", "linear"):
        raise UserError(f"{keys.path}: has {keys.arch}.rope.scaling.type={kind!r}; supported are none, linear, yarn")
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    return {"rope_type": "linear", "factor": factor}


class _Keys:
    """The settings of one architecture, taken one by one; `finish` refuses what nobody took."""

    def __init__(self, path: Path, arch: str, metadata: dict[str, Any]):
        self.path, self.arch = path, arch
        prefix = f"{arch}."
        self._left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._all = dict(self._left)

    def take(self, key: str, default: Any = _MISSING) -> Any:
        self._left.pop(key, None)
        value = self._all.get(key, default)
        if value is _MISSING:
            raise UserError(f"{self.path}: the metadata lack {self.arch}.{key}; convert the model again")
        return value

    def whole(self, key: str, default: Any = _MISSING) -> int:
        """A positive whole number; a list a layer is one number if all layers agree."""
        value = self.take(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{self.path}: has {self.arch}.{key}={value!r}; one whole number above 0 is needed")
        return value

    def only(self, key: str, allowed: Any) -> None:
        value = self.take(key, allowed)
        if value != allowed:
            raise UserError(f"{self.path}: has {self.arch}.{key}={value!r}; only {allowed!r} is supported here")

    def ignore(self, *keys: str) -> None:
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        if self._left:
            listed = ", ".join(f"{self.arch}.{key}={str(value)[:40]}" for key, value in sorted(self._left.items()))
            raise UserError(f"{self.path}: has settings we do not know: {listed}; ignoring them could be wrong")
