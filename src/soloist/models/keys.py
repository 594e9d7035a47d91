"""Typed reading of config.json in which no key goes unnoticed: it is read, ignored by name, or an error."""

from __future__ import annotations

import math
from typing import Any

from soloist.config import RopeConfig
from soloist.errors import UserError

_MISSING: Any = object()

HARMLESS = (
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "initializer_range", "model_type", "output_dropout", "pad_token_id",
    "pretraining_tp", "resid_pdrop", "sep_token_id", "torch_dtype", "transformers_version", "transformers.js_config",
    "unk_token_id", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "unsloth_fixed", "unsloth_version",
)  # fmt: skip
"""Keys without effect on the forward pass in any family, and token ids, which the text layer reads."""


class ConfigKeys:
    """A config.json whose keys are taken one by one; `finish` refuses what nobody took."""

    def __init__(self, hf: dict[str, Any]):
        self._hf = hf
        self._taken: set[str] = set(HARMLESS)

    def take(self, name: str, default: Any = _MISSING) -> Any:
        self._taken.add(name)
        value = self._hf.get(name, default)
        if value is _MISSING:
            raise UserError(f"config.json lacks {name!r}, which this model family needs")
        return value

    def whole(self, name: str, default: Any = _MISSING, low: int = 1, high: int = 1 << 31) -> int:
        value = self.take(name, default)
        if value is None and default is not _MISSING:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UserError(f"config.json has {name}={value!r}; a whole number from {low} to {high} is needed")
        return value

    def number(self, name: str, default: Any = _MISSING, low: float = -math.inf) -> float:
        return _number(name, self.take(name, default), low)

    def layers(self) -> int:
        """Their number, bounded before anything is built for each."""
        return self.whole("num_hidden_layers", high=10_000)

    def listed(self, name: str) -> list[Any] | None:
        """A list, or None where the key is absent or null."""
        value = self.take(name, None)
        if value is not None and not isinstance(value, list):
            raise UserError(f"config.json has {name}={value!r}; a list is needed")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, empty where the key is absent or null."""
        value = self.take(name, None)
        if value is not None and not isinstance(value, dict):
            raise UserError(f"config.json has {name}={value!r}; an object is needed")
        return dict(value or {})

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self.take(name, default)
        if value is None and default is not _MISSING:
            value = default
        if not isinstance(value, bool):
            raise UserError(f"config.json has {name}={value!r}; true or false is needed")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """The key may be absent or have one of these values: others change the forward pass in a way we do not run."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise UserError(f"config.json has {name}={value!r}; only {' or '.join(map(repr, allowed))} is supported")

    def ignore(self, *names: str) -> None:
        """Keys that have no effect here."""
        self._taken.update(names)

    def finish(self) -> None:
        unknown = sorted(set(self._hf) - self._taken)
        if unknown:
            listed = ", ".join(f"{name}={self._hf[name]!r}" for name in unknown)
            raise UserError(f"config.json has keys this version does not know: {listed}; ignoring them could be wrong")

    def dtype(self) -> str:
        """Stored dtype by name, float32 if none is given."""
        value = self._hf.get("dtype") or self._hf.get("torch_dtype") or "float32"
        return str(value).removeprefix("torch.")


def _number(name: str, value: Any, low: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < low:
        bound = "" if low == -math.inf else f" of at least {low:g}"
        raise UserError(f"config.json has {name}={value!r}; a number{bound} is needed")
    return float(value)


def divides(part: int, whole: int, names: str) -> None:
    if whole % part:
        raise UserError(f"config.json: {names} do not divide ({whole} by {part})")


def read_rope(keys: ConfigKeys, dim: int, max_positions: int, interleaved: bool = False) -> RopeConfig:
    """Both spellings: rope_theta with rope_scaling, and transformers 5's rope_parameters.

    Ling-3.0 turns all `dim` channels whatever its partial_rotary_factor says; elsewhere that factor has an effect.
    """
    if dim % 2:
        raise UserError(f"config.json: the rotary width is {dim}; channels turn in pairs, so it must be even")
    scaling = {**keys.mapping("rope_parameters"), **keys.mapping("rope_scaling")}
    given = scaling.pop("rope_theta", None)
    theta = _number("rope_theta", keys.take("rope_theta", 10000.0) if given is None else given, low=2.0)
    keys.ignore("rope_theta")
    kind: Any = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    partial = scaling.pop("partial_rotary_factor", None)
    if partial not in (None, 1) and not interleaved:
        raise UserError(f"config.json has partial_rotary_factor={partial!r}; only 1 is supported in this family")
    readers = {"default": _plain, "linear": _scaled, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
    if kind not in list(readers):
        raise UserError(f"config.json has rope type {kind!r}; supported are {', '.join(readers)}")
    fields = readers[kind](scaling, max_positions)
    if scaling:
        raise UserError(f"config.json has unknown rope settings for {kind!r}: {', '.join(sorted(scaling))}")
    factors = tuple(_number("rope_freq_factors", value, low=1e-9) for value in keys.listed("rope_freq_factors") or ())
    return RopeConfig(dim, theta, kind, interleaved, freq_factors=factors, **fields)


def reach(rope: RopeConfig, max_positions: int) -> int:
    """Positions a model may be run to: the stated ones, or as far as its rope variant stretches the trained ones."""
    if rope.kind in ("dynamic", "yarn"):
        return max(max_positions, int(rope.original_positions * rope.factor))
    return max_positions


def _take(scaling: dict[str, Any], name: str, default: Any = _MISSING, low: float = 1e-9) -> float:
    value = scaling.pop(name, default)
    if value is None and default is not _MISSING:
        value = default
    if value is _MISSING:
        raise UserError(f"config.json: the rope settings lack {name!r}")
    return _number(name, value, low)


def _plain(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    return {}


def _scaled(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    scaling.pop("original_max_position_embeddings", None)
    return {"factor": _take(scaling, "factor")}


def _dynamic(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    scaling.pop("original_max_position_embeddings", None)
    return {"factor": _take(scaling, "factor"), "original_positions": max_positions}


def _llama3(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    original = _take(scaling, "original_max_position_embeddings", max_positions)
    return {**{name: _take(scaling, name) for name in names}, "original_positions": int(original)}


def _yarn(scaling: dict[str, Any], max_positions: int) -> dict[str, Any]:
    original = int(_take(scaling, "original_max_position_embeddings", max_positions, low=1))
    factor = _take(scaling, "factor", max_positions / original)
    mscale, all_dims = scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
    given = scaling.pop("attention_factor", None)
    if given is None:
        given = _mscale(factor, mscale) / _mscale(factor, all_dims) if mscale and all_dims else _mscale(factor, 1)
    return {
        "factor": factor,
        "original_positions": original,
        "beta_fast": _take(scaling, "beta_fast", 32.0),
        "beta_slow": _take(scaling, "beta_slow", 1.0),
        "truncate": bool(scaling.pop("truncate", True)),
        "attention_factor": float(given),
    }


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def layer_list(keys: ConfigKeys, name: str, num_layers: int) -> list[float]:
    """A number a layer, 0 for null; zeros where there is no such list."""
    values = keys.listed(name)
    if values is None:
        return [0.0] * num_layers
    if len(values) != num_layers:
        raise UserError(f"config.json: {name} has {len(values)} entries for {num_layers} layers")
    return [_number(name, value or 0, low=0) for value in values]
