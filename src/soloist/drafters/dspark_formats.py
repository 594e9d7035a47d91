"""DSpark and DFlash checkpoints in the wild: recognised by what they hold, read into one configuration, or refused.

A drafter read wrongly is not wrong, only slow, and nothing shows it. So nothing is guessed: a field that decides between
two readings must be there. Sources: the public files of DeepSpec, speculators, SpecForge and z-lab's DFlash.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from soloist.config import GqaConfig, MlpConfig
from soloist.errors import UserError
from soloist.models.keys import ConfigKeys
from soloist.models.llama import read_gqa

FORMATS = "DeepSpec, speculators, SpecForge or z-lab DFlash"

MARKOV_KINDS = ("vanilla", "gated", "rnn")

_HARMLESS = (
    "num_anchors", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "auf", "_attn_implementation",
    "attn_implementation", "projector_type", "speculators_version", "speculators_config", "speculators_model_type",
    "max_window_layers", "use_sliding_window", "use_swa", "embed_tokens_from_target",
    "lm_head_from_target", "num_speculative_tokens",
    "has_no_defaults_at_init", "eagle_aux_hidden_state_layer_ids", "transformer_layer_config", "dflash_config",
    "dspark_config", "text_config", "tie_word_embeddings", "lambda_base_start", "lambda_base_decay_ratio",
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim",
)  # fmt: skip
"""Settings of training, of other engines, or of heads that these files do not have (their tensors would be refused)."""


@dataclass(frozen=True)
class DraftLayerConfig:
    """A layer of the block backbone. reach and causal: see ops/block_attention."""

    attention: GqaConfig
    mlp: MlpConfig
    reach: int
    causal: bool


@dataclass(frozen=True)
class DraftConfig:
    """A drafter. taps: layers of the model whose output it reads; anchor_first: slot k predicts the token after its
    place, otherwise the token at its place, and the anchor's slot nothing; markov: the head's kind, None without one.
    """

    format: str
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    norm_eps: float
    layers: tuple[DraftLayerConfig, ...]
    num_target_layers: int | None
    taps: tuple[int, ...]
    block_size: int
    anchor_first: bool
    mask_token_id: int
    markov: str | None
    markov_rank: int
    confidence: bool
    confidence_with_markov: bool

    @property
    def num_drafts(self) -> int:
        return self.block_size if self.anchor_first else self.block_size - 1


def read_draft_config(config: dict[str, Any], names: Collection[str]) -> DraftConfig:
    """config.json and the tensors' names -> what the drafter is.   Raises: UserError for anything else."""
    kind = identify(config, names)
    keys = ConfigKeys(_flat(config))
    keys.ignore(*_HARMLESS)
    keys.only("hidden_act", "silu")
    keys.only("attention_mode", "gqa", "full", None)
    keys.only("logit_scale", 1.0)
    keys.only("draft_adapter_rank", 0)
    hidden, vocab = keys.whole("hidden_size"), keys.whole("vocab_size")
    keys.only("target_hidden_size", hidden, None)
    rank = keys.whole("markov_rank", 0, low=0)
    if rank == 0 and any("markov_head." in name for name in names):
        raise UserError("config.json has markov_rank=0 or none, but the file holds a Markov head; restore the field")
    head = keys.take("markov_head_type", "vanilla")
    if head not in MARKOV_KINDS:
        raise UserError(f"config.json has markov_head_type={head!r}; supported are {', '.join(MARKOV_KINDS)}")
    sure = keys.flag("enable_confidence_head", keys.flag("use_confidence_head", False))
    sure_of_markov = keys.flag("confidence_head_with_markov", False)
    if sure and sure_of_markov and not rank:
        raise UserError("config.json has confidence_head_with_markov, but no markov_rank")
    block = keys.whole("block_size", low=2)
    found = DraftConfig(
        format=kind,
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=keys.whole("draft_vocab_size", vocab),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        layers=_layers(keys),
        num_target_layers=keys.take("num_target_layers", None),
        taps=_taps(keys, kind),
        block_size=block,
        anchor_first=_anchor_first(keys, kind, config, block),
        mask_token_id=keys.whole("mask_token_id", low=0),
        markov=head if rank else None,
        markov_rank=rank,
        confidence=sure,
        confidence_with_markov=sure and sure_of_markov,
    )
    keys.finish()
    return found


def identify(config: dict[str, Any], names: Collection[str]) -> str:
    """The format's name.   Raises: UserError naming a known format that is not supported, or that this is none."""
    nested = {**(config.get("dflash_config") or {}), **(config.get("dspark_config") or {})}
    architecture = str((config.get("architectures") or [""])[0])
    projector = config.get("projector_type") or nested.get("projector_type")
    other = _unsupported(config, nested, architecture, projector, names)
    if other:
        raise UserError(f"the drafter is {other}, which is not supported; supported are {FORMATS}")
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in ("dspark", "dflash"):
            raise UserError(f"the drafter has speculators_model_type={kind!r}; supported are 'dspark' and 'dflash'")
        return f"speculators {kind}"
    if "fc.weight" not in names and "encoder.fc.weight" not in names:
        raise UserError(f"this is no drafter (it has no tensor fc.weight); supported are {FORMATS}")
    if "DSpark" in architecture or projector == "dspark":
        return "SpecForge DSpark" if nested else "DeepSpec DSpark"
    if nested or architecture.startswith("DFlash"):
        return "DFlash"
    raise UserError(f"the drafter has architectures={[architecture]!r}, which tells no format; supported are {FORMATS}")


def _unsupported(
    config: dict[str, Any], nested: dict[str, Any], architecture: str, projector: str | None, names: Collection[str]
) -> str | None:
    both = {**nested, **config}
    if any(key.startswith("dspark_") and key != "dspark_config" for key in config):
        return "a DeepSeek-V4 bundle (dspark_* fields)"
    if projector == "domino" or any(name.startswith("prefix_gru.") for name in names):
        return "Domino"
    if any(both.get(key) for key in ("selector_rank", "selector_top_k", "conv_kernel_size")):
        return "DFlash2"
    if any(name.startswith("aux_hidden_norms.") for name in names):
        return "a Laguna drafter (aux_hidden_norms)"
    if "Gemma" in architecture or str(config.get("model_type")).startswith("gemma"):
        return "made for Gemma"
    if any("kv_a_proj" in name for name in names):
        return "a drafter with latent attention"
    if any(name.endswith(("eh_proj.weight", "input_proj.weight")) or name == "mtp.fc.weight" for name in names):
        return "an MTP layer"
    if "midlayer.self_attn.q_proj.weight" in names or "Eagle" in architecture:
        return "EAGLE"
    return None


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Nested settings brought to the top; the outer of two that are set counts."""
    flat: dict[str, Any] = {}
    for name in ("transformer_layer_config", "dflash_config", "dspark_config", "text_config"):
        flat.update(config.get(name) or {})
    flat.update({key: value for key, value in config.items() if value is not None or key not in flat})
    return flat


def _taps(keys: ConfigKeys, kind: str) -> tuple[int, ...]:
    """speculators counts from the embedding's output, the others from the first layer's."""
    own, other = "target_layer_ids", "aux_hidden_state_layer_ids"
    name = other if kind.startswith("speculators") else own
    ids = keys.take(name)
    keys.ignore(own, other)
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise UserError(f"config.json has {name}={ids!r}; a list of layer numbers is needed")
    taps = tuple(i - (name == other) for i in ids)
    if taps[0] < 0 or list(taps) != sorted(set(taps)):
        raise UserError(f"config.json has {name}={ids}; they must rise strictly, and the embedding cannot be read")
    return taps


def _anchor_first(keys: ConfigKeys, kind: str, config: dict[str, Any], block: int) -> bool:
    said = [keys.take(name, None) for name in ("sample_from_anchor", "shift_label")]
    said = [value for value in said if isinstance(value, bool)]
    if said:
        return bool(said[0])
    if kind != "speculators dspark":
        return kind.endswith("DSpark")
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    if drafted not in (block, block - 1):
        raise UserError(
            "config.json lacks sample_from_anchor, and files of this format exist in both layouts; set it to true if "
            "the first slot predicts the token after the anchor"
        )
    return bool(drafted == block)


def _layers(keys: ConfigKeys) -> tuple[DraftLayerConfig, ...]:
    style = [keys.take(name, None) for name in ("rope_is_neox_style", "is_neox_style")]
    if False in style:
        raise UserError("config.json has rope_is_neox_style=false; drafters with interleaved rope are not supported")
    keys.only("rope_interleaved", False)
    keys.only("rope_interleave", False)
    keys.only("partial_rotary_factor", 1.0)
    for name in ("attention_bias", "mlp_bias", "attention_sinks"):
        keys.only(name, False)
    attention = read_gqa(keys, keys.whole("max_position_embeddings", 4096), qk_norm=True, qkv_bias=False, out_bias=False)
    mlp = MlpConfig(keys.whole("intermediate_size"))
    count = keys.whole("num_hidden_layers")
    kinds = keys.take("layer_types", None) or ["full_attention"] * count
    reach = keys.take("sliding_window", None)
    causal = keys.take("causal", keys.take("is_causal", None))
    if keys.flag("sliding_window_non_causal", False):
        causal = False
    if len(kinds) < count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UserError(f"config.json has layer_types={kinds}; {count} of full_attention or sliding_attention are needed")
    layers = []
    for sliding in (kind == "sliding_attention" for kind in kinds[:count]):
        if sliding and (type(reach) is not int or reach < 1):
            raise UserError(f"config.json has sliding_attention layers and sliding_window={reach!r}; set the window")
        # Unless told otherwise, files of all makers are causal inside a block where they slide, and only there.
        layers.append(DraftLayerConfig(attention, mlp, reach if sliding else 0, sliding if causal is None else causal))
    return tuple(layers)


_PREFIXES = re.compile(r"^(language_model\.)?(model\.)?(dspark\.)?")
_ALIASES = {
    "encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}  # fmt: skip


def destinations(config: DraftConfig, names: Collection[str]) -> dict[str, str]:
    """Tensor name as stored -> `module path:slot` of DsparkModel."""
    stored = {_ALIASES.get(plain, plain): name for name in names for plain in [_PREFIXES.sub("", name)]}
    found = {"fc.weight": "fc:weight", "hidden_norm.weight": "hidden_norm:weight", "norm.weight": "norm:weight"}
    for i in range(len(config.layers)):
        found.update({f"layers.{i}.{name}.weight": f"layers.{i}.{target}" for name, target in _LAYER.items()})
    if config.markov:
        names_of = {"gated": ("gate_proj",), "rnn": ("joint_proj",), "vanilla": ()}[config.markov]
        found |= {f"markov_head.markov_w{i}.weight": f"markov.w{i}:weight" for i in (1, 2)}
        found |= {f"markov_head.{n}.weight": "markov.joint:weight" for n in names_of}
        found |= {f"markov_head.{n}.bias": "markov.joint:weight.bias" for n in names_of}
    if config.confidence:
        found |= {"confidence_head.proj.weight": "confidence:weight", "confidence_head.proj.bias": "confidence:weight.bias"}
    if config.draft_vocab_size < config.vocab_size:
        found["lm_head.weight"] = "head:weight"
    return {stored.get(name, name): target for name, target in found.items()}


_LAYER = {
    "input_layernorm": "input_norm:weight", "post_attention_layernorm": "post_norm:weight",
    "self_attn.q_proj": "q:weight", "self_attn.k_proj": "kv:k", "self_attn.v_proj": "kv:v",
    "self_attn.q_norm": "q_norm:weight", "self_attn.k_norm": "k_norm:weight", "self_attn.o_proj": "out:weight",
    "mlp.gate_proj": "mlp.gate_up:gate", "mlp.up_proj": "mlp.gate_up:up", "mlp.down_proj": "mlp.down:weight",
}  # fmt: skip

IGNORED = (r"(^|\.)embed_tokens\.weight$", r"(^|\.)(verifier_)?lm_head\.weight$", r"^t2d$", r"^d2t$", r"rotary_emb\.inv_freq$")
"""Copies of the model's own embedding and head, which serve the drafter too; the vocabulary maps are read elsewhere."""
