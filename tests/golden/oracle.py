"""Runs a checkpoint in transformers (fp32, eager, CPU) and in the naive implementation, and records what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from soloist.testing.checkpoints import random_tensors, save_checkpoint, write_checkpoint
from tests.golden.cases import GREEDY_PROMPTS, GREEDY_TOKENS, LING, NAIVE_ONLY, PROMPT, ROWS, config_of
from tests.naive_ling import LIMITS, NaiveLing

Record = dict[str, np.ndarray]
"""text [LENGTH]; logits [ROWS, V]; decode_logits [rows of ROWS from PROMPT on, V]; layers [L, ROWS, D];
argmax [LENGTH]; greedy_<n> [GREEDY_TOKENS]; routes_<layer> [LENGTH, K], ascending; margin: the smallest lead of a
choice.
"""


def record(kind: str, folder: Path, text: torch.Tensor) -> Record:
    """What the golden file of this kind holds."""
    found = naive_record(kind, text) if kind in NAIVE_ONLY else transformers_record(kind, folder, text)
    if kind == "ling-mtp":
        naive = naive_ling(kind)
        predicted = naive.mtp_logits(naive(text).hidden[:-1], text[1:])
        found["mtp_logits"] = single(predicted[[row for row in ROWS if row < len(predicted)]])
    found["text"] = text.numpy().astype(np.uint8)
    return found


@torch.inference_mode()
def transformers_logits(folder: Path, kind: str, text: torch.Tensor) -> torch.Tensor:
    """Logits [T, V] of one full prefill."""
    write_checkpoint(folder, kind)
    logits: torch.Tensor = load_transformers(folder)(text[None], use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def transformers_record(kind: str, folder: Path, text: torch.Tensor) -> Record:
    write_checkpoint(folder, kind)
    model = load_transformers(folder)
    streams: list[torch.Tensor] = []
    gates: dict[int, tuple[torch.Tensor, ...]] = {}
    hooks = []
    for i, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_hook(lambda _m, _a, out: streams.append(first(out)[0])))
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(lambda _m, _a, out, i=i: gates.update({i: out})))
    logits = model(text[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    found = _pack(logits, streams, {i: chosen for i, (_, _, chosen) in gates.items()})
    steps = list(_steps(model, text[:PROMPT].tolist(), text[PROMPT:].tolist()))
    decoded = dict(zip(range(PROMPT - 1, len(text)), steps, strict=True))
    found["decode_logits"] = single(torch.stack([decoded[row] for row in ROWS if row >= PROMPT]))
    margins = [_routing_lead(kind, gates), smallest_lead(logits)]
    for length in GREEDY_PROMPTS:
        ids, rows = _greedy(model, text[:length].tolist())
        found[f"greedy_{length}"] = np.array(ids, np.uint8)
        margins.append(smallest_lead(rows))
    found["margin"] = np.array(min(margins))
    return found


@torch.inference_mode()
def naive_record(kind: str, text: torch.Tensor) -> Record:
    """The same record from the naive implementation: it decodes by starting over."""
    naive = naive_ling(kind)
    out = naive(text)
    found = _pack(out.logits, out.layers, out.routes)
    found["decode_logits"] = single(out.logits[[row for row in ROWS if row >= PROMPT]])
    margins = [out.margin, smallest_lead(out.logits)]
    for length in GREEDY_PROMPTS:
        ids = text[:length].tolist()
        for _ in range(GREEDY_TOKENS):
            last = naive(torch.tensor(ids)).logits[-1:]
            margins.append(smallest_lead(last))
            ids.append(int(last.argmax()))
        found[f"greedy_{length}"] = np.array(ids[length:], np.uint8)
    found["margin"] = np.array(min(margins))
    return found


def naive_ling(kind: str) -> NaiveLing:
    assert kind in LING, kind
    return NaiveLing(config_of(kind), random_tensors(config_of(kind)))


def load_transformers(folder: Path) -> Any:
    """The model with every tensor in place. What transformers' port leaves out of Ling-3.0 is put in: see `_clamp`."""
    import transformers

    config = json.loads((folder / "config.json").read_text())
    # The port shortens YaRN's rotary width by this field, which the vendor's code ignores.
    config.pop("partial_rotary_factor", None)
    (folder / "config.json").write_text(json.dumps(config))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    faults = {what: names for what, names in report.items() if names}
    assert not faults, faults
    if any(any(config.get(name) or ()) for name in LIMITS):
        _clamp(model, config)
    return model.eval()


def _clamp(model: Any, config: dict[str, Any]) -> None:
    """Swap in Step-3.7's feed-forwards, which have the SwiGLU limits that the port of Ling-3.0 lacks."""
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

    routed, shared = (config[name] for name in LIMITS)
    settings = SimpleNamespace(
        num_local_experts=config["num_experts"], hidden_size=config["hidden_size"], hidden_act="silu", mlp_bias=False,
        moe_intermediate_size=config["moe_intermediate_size"], swiglu_limits_shared=shared,
        share_expert_dim=config["moe_shared_expert_intermediate_size"],
    )  # fmt: skip
    for i, layer in enumerate(model.model.layers):
        if not hasattr(layer.mlp, "gate"):
            continue
        experts = Step3p7Experts(settings, routed[i] or None)
        both = Step3p7MLP(settings, i, is_shared_expert=True)
        experts.load_state_dict(layer.mlp.experts.state_dict())
        both.load_state_dict(layer.mlp.shared_experts.state_dict())
        layer.mlp.experts, layer.mlp.shared_experts = experts, both


def _steps(model: Any, prompt: list[int], following: list[int]) -> Any:
    """Logits [V] after the prompt and after each following token, decoded one by one with a cache."""
    _forget_lengths(model)
    cache = None
    for ids in (prompt, *([token] for token in following)):
        out = model(torch.tensor([ids]), cache=cache, use_cache=True)
        cache = out.cache
        yield out.logits[0, -1]


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    _forget_lengths(model)
    cache, ids, chosen, rows = None, prompt, [], []
    for _ in range(GREEDY_TOKENS):
        out = model(torch.tensor([ids]), cache=cache, use_cache=True)
        cache, row = out.cache, out.logits[0, -1]
        rows.append(row)
        ids = [int(row.argmax())]
        chosen += ids
    return chosen, torch.stack(rows)


def _forget_lengths(model: Any) -> None:
    """Dynamic rope in transformers keeps the frequencies of the longest text so far: start as a new process would."""
    rotary = model.model.rotary_emb
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq.copy_(rotary.original_inv_freq)


def _pack(logits: torch.Tensor, streams: list[torch.Tensor], routes: dict[int, torch.Tensor]) -> Record:
    rows = list(ROWS)
    found = {
        "logits": single(logits[rows]),
        "layers": single(torch.stack([stream[rows] for stream in streams])),
        "argmax": logits.argmax(-1).numpy().astype(np.uint8),
    }
    found.update({f"routes_{i}": chosen.sort(-1).values.numpy().astype(np.uint8) for i, chosen in routes.items()})
    return found


def _routing_lead(kind: str, gates: dict[int, tuple[torch.Tensor, ...]]) -> float:
    """The smallest lead of a chosen expert or group. The naive router must choose the same from the same logits."""
    lead = float("inf")
    for i, (logits, _, chosen) in gates.items():
        if kind not in LING:
            ordered = logits.softmax(-1).sort(descending=True).values
            count = chosen.shape[1]
            lead = min(lead, float((ordered[:, count - 1] - ordered[:, count]).min()))
            continue
        naive = naive_ling(kind)
        again = naive.route(f"model.layers.{i}.mlp.", logits.double())[1]
        assert torch.equal(again.sort(-1).values, chosen.sort(-1).values), (kind, i)
        lead = min(lead, naive.margin)
    return lead


def smallest_lead(logits: torch.Tensor) -> float:
    """How close the best token of any row [T, V] is to the second."""
    best = logits.topk(2, -1).values
    return float((best[:, 0] - best[:, 1]).min())


def single(values: torch.Tensor) -> np.ndarray:
    return values.numpy().astype(np.float32)


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


class TransformersMtp:
    """The NEXTN layer made of transformers' own block, norms and head: its block is loaded in place of the last layer's,
    which is of the same kind. Only the wiring around it is ours, by the public serving code.
    """

    def __init__(self, kind: str, folder: Path):
        config, tensors = config_of(kind), random_tensors(config_of(kind))
        last, own = f"model.layers.{config['num_hidden_layers'] - 1}.", f"model.layers.{config['num_hidden_layers']}."
        moved = {name: values for name, values in tensors.items() if not name.startswith((last, own))}
        outside = ("enorm", "hnorm", "eh_proj", "final_layernorm")
        for name, values in tensors.items():
            if name.startswith(own) and not name.removeprefix(own).startswith(outside):
                moved[last + name.removeprefix(own)] = values
        save_checkpoint(folder, {**config, "num_nextn_predict_layers": 0}, moved)
        self.model = load_transformers(folder)
        self.block = self.model.model.layers[-1]
        self.join = torch.from_numpy(tensors[own + "eh_proj.weight"])
        self.embed_norm, self.hidden_norm, self.final_norm = (
            self._norm(tensors[own + name + ".weight"]) for name in ("enorm", "hnorm", "final_layernorm")
        )

    def _norm(self, weight: np.ndarray) -> torch.nn.Module:
        norm = type(self.model.model.norm)(len(weight), self.model.config.rms_norm_eps)
        norm.weight.data.copy_(torch.from_numpy(weight))
        return norm

    @torch.inference_mode()
    def hidden(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The layer's output [T, D] after its norm. hidden [T, D] after the model's final norm; following [T] ids."""
        T, inner = len(following), self.model.model
        embedding = self.embed_norm(inner.embed_tokens(following))
        x = torch.cat((embedding, self.hidden_norm(hidden)), -1) @ self.join.T
        places = torch.arange(T)[None]
        future = torch.full((T, T), float("-inf")).triu(1)[None, None]
        out = self.block(
            x[None], attention_mask=future, position_ids=places, position_embeddings=inner.rotary_emb(x[None], places)
        )
        return self.final_norm(first(out)[0])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(hidden)

    def chain(self, hidden: torch.Tensor, ids: torch.Tensor, width: int) -> list[int]:
        """Greedy drafts behind ids [T + 1], chained over the layer's own outputs, without a cache. hidden [T, D]."""
        following, drafts = ids[1:], list[int]()
        for _ in range(width):
            out = self.hidden(hidden, following)
            drafts.append(int(self.logits(out[-1]).argmax()))
            hidden, following = torch.cat((hidden, out[-1:])), torch.cat((following, torch.tensor(drafts[-1:])))
        return drafts
