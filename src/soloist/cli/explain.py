"""Show how a model would run here: its shape, the resolved plan, the implementation of every op, and the speed limit.

The limit is the time that memory takes to deliver the bytes of a token: no plain decoding is faster. Reads no weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from soloist.cli.flags import add_engine_flags, add_json_flag, engine
from soloist.config import BlockConfig, EngineConfig, GqaConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig, Plan

if TYPE_CHECKING:
    from soloist.runtime.traffic import Traffic

CONTEXTS = (128, 1024, 8192, 65536)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = EngineConfig(**engine(args))

    import torch

    from soloist.dist.launch import outline
    from soloist.dist.place import is_follower
    from soloist.runtime.assemble import DTYPES, measure_exchange
    from soloist.runtime.traffic import read_rate, token_traffic

    plan, model = resolved(config)
    device, group = torch.device(plan.device), outline(config.tensor_parallel, config.tp_rank_of)
    if config.tensor_parallel > 1 and device.type == "cuda":
        plan = dataclasses.replace(plan, exchange=measure_exchange(config, device))
    if is_follower(config.tensor_parallel):
        return 0
    if device.type == "cpu":
        torch.set_num_threads(plan.threads)
    places = sorted({min(context, plan.context_length) for context in (*CONTEXTS, plan.context_length)})
    traffic = [token_traffic(model, DTYPES[plan.dtype], context, group) for context in places]
    record = explanation(plan, model, traffic, read_rate(device), op_table(device.type))
    print(json.dumps(record) if args.json else "\n\n".join(as_text(record)))
    return 0


def resolved(config: EngineConfig) -> tuple[Plan, ModelConfig]:
    """The plan and the shape of a model, without its weights.   Raises: UserError for what cannot be had."""
    from soloist.runtime.assemble import resolve
    from soloist.weights.checkpoint import open_checkpoint
    from soloist.weights.hub import resolve_model_path

    checkpoint = open_checkpoint(resolve_model_path(config.model))
    try:
        return resolve(config, checkpoint)
    finally:
        checkpoint.close()


def explanation(
    plan: Plan, model: ModelConfig, traffic: list[Traffic], rate: float, ops: list[dict[str, str]]
) -> dict[str, Any]:
    """The JSON object. limits: at each context, bytes a token reads and the milliseconds that takes at `rate`."""
    limits = [
        {"context": t.context, "weight_bytes": t.weight_bytes, "state_bytes": t.state_bytes,
         "tpot_ms": t.total_bytes / rate * 1e3, "tokens_per_s": rate / t.total_bytes}
        for t in traffic
    ]  # fmt: skip
    return {
        "model": model_shape(model) | {"active_parameters": traffic[0].active_parameters},
        "plan": dataclasses.asdict(plan),
        "read_bytes_per_s": rate,
        "limits": limits,
        "ops": ops,
    }


def model_shape(model: ModelConfig) -> dict[str, Any]:
    """What a reader wants to know of a ModelConfig: sizes, and how many layers of which kind."""
    mixers = Counter(_mixer(block) for block in model.blocks)
    feed_forwards = Counter(_feed_forward(block) for block in model.blocks)
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "tied_head": model.tied_head,
        "mixers": dict(mixers),
        "feed_forwards": dict(feed_forwards),
        "mtp_layers": len(model.mtp_blocks),
    }


def _mixer(block: BlockConfig) -> str:
    mixer = block.mixer
    if isinstance(mixer, GqaConfig):
        return f"attention, {mixer.num_heads} heads of {mixer.head_dim} on {mixer.num_kv_heads} key/value heads"
    if isinstance(mixer, MlaConfig):
        return f"MLA, {mixer.num_heads} heads on a latent of {mixer.kv_lora_rank} + {mixer.rope.dim}"
    assert isinstance(mixer, KdaConfig)
    return f"KDA, {mixer.num_heads} heads with a {mixer.head_dim} x {mixer.head_dim} matrix each"


def _feed_forward(block: BlockConfig) -> str:
    mlp = block.mlp
    if isinstance(mlp, MoeConfig):
        shared = f" and a shared one of width {mlp.shared.width}" if mlp.shared else ""
        return f"{mlp.top_k} of {mlp.num_experts} experts of width {mlp.width}{shared}"
    return f"dense, width {mlp.width}"


def op_table(device_type: str) -> list[dict[str, str]]:
    """Every op: the implementation that runs on this kind of device, and why that one. Freezes the choices."""
    from soloist.ops.op import REGISTRY

    rows = []
    for name, op in sorted(REGISTRY.items()):
        others = [other for other in op.impls.get(device_type, {}) if other != op.choose(device_type)]
        why = f"before {', '.join([*others, 'reference'])}"
        if op.choose(device_type) == "reference":
            why = f"no other for {device_type}" if not others else f"before {', '.join(others)}"
        rows.append({"op": name, "implementation": op.choose(device_type), "why": why})
    return rows


def as_text(record: dict[str, Any]) -> list[str]:
    """The record as sections for a reader."""
    model, plan = record["model"], record["plan"]
    layers = [f"  {count} x {what}" for what, count in [*model["mixers"].items(), *model["feed_forwards"].items()]]
    if model["mtp_layers"]:
        layers.append(f"  {model['mtp_layers']} x next-token-prediction layer, for the mtp drafter")
    head = (
        f"{model['architecture']}: {_count(plan['num_parameters'])} parameters, {_count(model['active_parameters'])} "
        f"read for a token; {model['num_layers']} layers, hidden size {model['hidden_size']}, vocabulary "
        f"{model['vocab_size']}{', head tied to the embedding' if model['tied_head'] else ''}"
    )
    width = max(map(len, plan))
    fields = [f"  {name:{width}}  {_value(name, value)}" for name, value in plan.items()]
    limits = [
        f"  {row['context']:>7}  {row['weight_bytes'] / 1e6:10.1f}  {row['state_bytes'] / 1e6:8.1f}  "
        f"{row['tpot_ms']:9.3f}  {row['tokens_per_s']:9.1f}"
        for row in record["limits"]
    ]
    names = max(len(row["op"]) for row in record["ops"])
    impls = max(len(row["implementation"]) for row in record["ops"])
    ops = [f"  {row['op']:{names}}  {row['implementation']:{impls}}  {row['why']}" for row in record["ops"]]
    rate = f"{record['read_bytes_per_s'] / 1e9:.1f} GB/s"
    return [
        "\n".join([head, *layers]),
        "\n".join(["plan", *fields]),
        "\n".join([f"limit of plain decoding, memory read at {rate} (measured just now)",
                   "  context  weights MB  state MB  ms/token      tok/s", *limits]),
        "\n".join(["ops", *ops]),
    ]  # fmt: skip


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _value(name: str, value: Any) -> str:
    return f"{value} ({value / 1e6:.1f} MB)" if name.endswith("_bytes") else str(value)
