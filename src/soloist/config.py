"""The three configurations: the checkpoint, the engine, the request; and `resolve`, which turns them into a Plan.

Parts of the engine receive values from here, never a configuration object they could read more from.
This is the only file that reads the environment.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from soloist.errors import UserError

MAX_WINDOW = 16
"""Most rows one round may verify: the anchor and up to 15 drafted tokens."""


# ---- the checkpoint --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` channels. `kind` follows the Hugging Face `rope_type` names."""

    dim: int
    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    freq_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class GqaConfig:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention with one output gate a head (Ling-3.0)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    v_dim: int
    rope: RopeConfig
    scale: float


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention with the bounded ("safe") gate law."""

    num_heads: int
    head_dim: int
    conv_width: int
    lower_bound: float


@dataclass(frozen=True)
class MlpConfig:
    """Gated feed-forward. `limit` > 0 clamps SiLU(gate) from above and up on both sides."""

    width: int
    limit: float = 0.0
    bias: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts and an optional shared expert."""

    num_experts: int
    top_k: int
    width: int
    score: Literal["sigmoid", "softmax"]
    normalise: bool
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    selection_bias: bool = False
    limit: float = 0.0
    shared: MlpConfig | None = None


Mixer = GqaConfig | MlaConfig | KdaConfig


@dataclass(frozen=True)
class BlockConfig:
    """One decoder layer: a token mixer and a feed-forward."""

    mixer: Mixer
    mlp: MlpConfig | MoeConfig


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint is. Made by the family's `config(hf)`, from nothing but config.json."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    blocks: tuple[BlockConfig, ...]
    max_positions: int
    tied_head: bool
    dtype: str
    mtp_blocks: tuple[BlockConfig, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.blocks)


# ---- the engine ------------------------------------------------------------------------------------------------------

DRAFTERS = ("none", "ngram", "mtp", "dspark", "scripted", "auto")
ACCEPTANCES = ("equality", "rejection")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineConfig:
    """How to run. Every field is a keyword of `LLM` and a flag of the command line; a test freezes the list."""

    model: str = "nano"
    drafter: str = "none"
    drafter_path: str | None = None
    draft_width: int | str = "auto"
    acceptance: str = "equality"
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    prefill_chunk: int | str = "auto"
    prefix_cache_bytes: int = 1 << 29
    threads: int | None = None
    tensor_parallel: int = 1
    tp_rank_of: int | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise UserError("model is empty; pass a folder in Hugging Face layout or a .gguf file")
        _one_of("drafter", self.drafter, DRAFTERS)
        _one_of("acceptance", self.acceptance, ACCEPTANCES)
        _one_of("dtype", self.dtype, DTYPES)
        if not isinstance(self.device, str):
            raise UserError(f"device={self.device!r} is not one of auto, cpu, cuda, cuda:N")
        self._check_drafting()
        if self.context_length is not None:
            _whole("context_length", self.context_length, 2, 1 << 24)
        if isinstance(self.prefill_chunk, str) and self.prefill_chunk != "auto":
            raise UserError(f"prefill_chunk={self.prefill_chunk!r} must be auto or a whole number from 1 to {1 << 20}")
        if self.prefill_chunk != "auto":
            _whole("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        _whole("prefix_cache_bytes", self.prefix_cache_bytes, 0, 1 << 50)
        if self.threads is not None:
            _whole("threads", self.threads, 1, 4096)
        self._check_ranks()

    def _check_ranks(self) -> None:
        _whole("tensor_parallel", self.tensor_parallel, 1, 64)
        if self.tp_rank_of is not None:
            _whole("tp_rank_of", self.tp_rank_of, 2, 64)
            if self.tensor_parallel > 1:
                raise UserError(f"tp_rank_of={self.tp_rank_of} runs one rank alone; leave out tensor_parallel")
        if self.tensor_parallel > 1 and ":" in self.device:
            raise UserError(
                f"device={self.device!r} names one GPU, tensor_parallel={self.tensor_parallel} takes one for each rank; "
                "give device=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )

    def _check_drafting(self) -> None:
        if self.draft_width != "auto":
            if isinstance(self.draft_width, str):
                raise UserError(f"draft_width={self.draft_width!r} must be auto or a whole number from 1 to 15")
            _whole("draft_width", self.draft_width, 1, MAX_WINDOW - 1)
        if self.drafter == "none":
            if self.draft_width != "auto":
                raise UserError(f"draft_width={self.draft_width}, but drafter=none drafts nothing; choose a drafter")
            if self.acceptance == "rejection":
                raise UserError("acceptance=rejection, but drafter=none drafts nothing to reject; choose a drafter")
        if self.drafter == "scripted" and self.drafter_path is None:
            raise UserError('drafter=scripted needs drafter_path, a JSON file {"script": [ids...]}')
        if self.drafter_path is not None and self.drafter in ("none", "ngram", "mtp"):
            raise UserError(
                f"drafter_path={self.drafter_path!r} is not read by drafter={self.drafter}; remove it, or choose "
                "drafter=dspark or drafter=scripted"
            )


@dataclass(frozen=True)
class Plan:
    """Everything `resolve` decided, with nothing left to choose. Printed by `explain`, stored in benchmark files.

    Bytes and parameters are one rank's. ranks: how many run the model, or which one runs alone for measuring; exchange:
    how their sums travel, measured and chosen when the ranks have met.
    """

    model: str
    architecture: str
    num_parameters: int
    parameter_bytes: int
    device: str
    device_name: str
    dtype: str
    context_length: int
    prefill_chunk: int
    prefix_cache_bytes: int
    threads: int
    drafter: str
    draft_width: int
    width_choice: str
    acceptance: str
    window: int
    page_size: int
    state_bytes: int
    ranks: str = "1"
    exchange: str = "none"

    @property
    def caveat(self) -> str | None:
        """What nothing of this run may be quoted without."""
        return f"rank {self.ranks}" if "alone" in self.ranks else None


def engine_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields of EngineConfig, from which the command line makes its flags."""
    return dataclasses.fields(EngineConfig)


def environment_threads() -> int | None:
    """OMP_NUM_THREADS where it is set to a positive number, otherwise None."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdigit() and int(value) > 0 else None


def environment_api_keys() -> tuple[str, ...]:
    """The keys in SOLOIST_API_KEY, separated by commas: unlike a flag, other users of the machine cannot see them."""
    return tuple(filter(None, os.environ.get("SOLOIST_API_KEY", "").split(",")))


def kernel_cache_folder() -> Path:
    """Where Triton keeps compiled kernels."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def terminal_is_dumb() -> bool:
    """Whether TERM says that the terminal knows no cursor movements, or nothing."""
    return os.environ.get("TERM", "dumb") == "dumb"


# ---- the request -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """One request, with OpenAI's names and defaults. Invalid values raise UserError at construction.

    temperature 0 is greedy. Order of the processors: logit_bias, penalties, min_tokens, temperature, top_k, top_p,
    min_p. `logprobs` = number of alternatives reported beside the chosen token (0 to 20), None = no logprobs; they
    are natural logarithms of the model's own distribution, before any processor. `seed` None draws a fresh one.
    `max_tokens` None generates to the end of the context. `stop` is not looked for in the first `min_tokens` tokens.
    `response_format` as in OpenAI's API, and {"type": "regex", "regex": ...} and {"type": "grammar", "grammar": ...}
    with a Lark or GBNF grammar; its mask comes after min_tokens, before temperature. Behind reasoning it holds from
    `</think>` on.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    response_format: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _whole("top_k", self.top_k, -1, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e3, above_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, 1 << 31)
        _whole("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos={self.ignore_eos!r} must be true or false")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, 20)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.response_format is not None:
            _response_format(self.response_format)
        if self.constrained:
            self._check_constrained()

    def _check_constrained(self) -> None:
        """A grammar says where the text may end, and where it must."""
        if self.ignore_eos:
            raise UserError("ignore_eos=True goes on behind the end that response_format sets; remove one of them")
        if self.min_tokens:
            raise UserError(
                f"min_tokens={self.min_tokens}, but the grammar of response_format may end sooner; remove one of them"
            )

    @property
    def constrained(self) -> bool:
        """Whether a grammar limits the tokens."""
        return self.response_format is not None and self.response_format["type"] != "text"

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


RESPONSE_FORMATS: dict[str, tuple[str, type] | None] = {
    "text": None,
    "json_object": None,
    "json_schema": ("json_schema", dict),
    "regex": ("regex", str),
    "grammar": ("grammar", str),
}
"""Kinds of response_format, and the key that each needs beside `type`."""


def _response_format(value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        kinds = ", ".join(RESPONSE_FORMATS)
        raise UserError(f"response_format={value!r} must be an object whose type is one of {kinds}")
    needed = RESPONSE_FORMATS[kind]
    keys = {"type"} if needed is None else {"type", needed[0]}
    if set(value) != keys:
        raise UserError(f"response_format of type {kind} has the keys {', '.join(sorted(keys))}, not {', '.join(value)}")
    if needed is not None and not isinstance(value[needed[0]], needed[1]):
        raise UserError(f"response_format.{needed[0]}={value[needed[0]]!r} must be a {needed[1].__name__}")
    if kind == "json_schema":
        _json_schema(value["json_schema"])


def _json_schema(value: dict[str, Any]) -> None:
    """The schema holds whether `strict` is set or not."""
    kinds: dict[str, tuple[type, ...]] = {"schema": (dict, bool), "name": (str,), "description": (str, NoneType),
                                          "strict": (bool, NoneType)}  # fmt: skip
    unknown = set(value) - set(kinds)
    if unknown or "schema" not in value:
        came = f"has no key {', '.join(sorted(unknown))}" if unknown else "needs the key schema"
        raise UserError(f"response_format.json_schema {came}; its keys are {', '.join(kinds)}")
    for key, one in value.items():
        if not isinstance(one, kinds[key]):
            raise UserError(f"response_format.json_schema.{key}={one!r} must be a {kinds[key][0].__name__}")


def _stops(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    """None, which OpenAI's clients send, is the same as nothing."""
    stops = [stop] if isinstance(stop, str) else _listed("stop", stop)
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UserError(f"stop={text!r} must be a non-empty string or a list of such strings")
    return tuple(stops)


def _ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    listed = _listed("stop_token_ids", ids)
    for token in listed:
        _whole("stop_token_ids", token, 0, 1 << 31)
    return tuple(listed)


def _listed(name: str, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise UserError(f"{name}={value!r} must be a list")
    return list(value or ())


def _bias(bias: dict[int, float]) -> dict[int, float]:
    """OpenAI sends token ids as JSON strings; accept both."""
    if not isinstance(bias, dict):
        raise UserError(f"logit_bias={bias!r} must map token ids to numbers from -100 to 100")
    clean = {}
    for token, value in bias.items():
        if isinstance(token, str) and token.isdigit():
            token = int(token)
        _whole("logit_bias token", token, 0, 1 << 31)
        _number(f"logit_bias[{token}]", value, -100.0, 100.0)
        clean[token] = float(value)
    return clean


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{name}={value!r} is not one of {', '.join(allowed)}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UserError(f"{name}={value!r} must be a whole number from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, above_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        bounds = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
        raise UserError(f"{name}={value!r} must be a number {bounds}")
