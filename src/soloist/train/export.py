"""Trainable model to and from a folder in Hugging Face layout with the public tensor names."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soloist.errors import UserError
from soloist.train.model import Ling
from soloist.train.shape import LingShape

_FP32 = ("A_log", "dt_bias", "expert_bias", "gate.weight")


def public_tensors(model: Ling) -> dict[str, Tensor]:
    """Tensors under their public names: experts split, bf16 but for the decay, the router and its bias."""
    out: dict[str, Tensor] = {}
    width = model.shape.moe_intermediate_size
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        if name.endswith("experts.gate_up"):
            for e, both in enumerate(tensor):
                prefix = name.removesuffix("gate_up") + str(e)
                out[f"{prefix}.gate_proj.weight"], out[f"{prefix}.up_proj.weight"] = both[:width], both[width:]
        elif name.endswith("experts.down"):
            for e, down in enumerate(tensor):
                out[f"{name.removesuffix('down')}{e}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return {n: t.to(torch.float32 if n.endswith(_FP32) else torch.bfloat16).contiguous() for n, t in out.items()}


def load_public(tensors: dict[str, Tensor], shape: LingShape) -> Ling:
    """A trainable model from public tensors. Raises: UserError for missing or unknown names."""
    model = Ling(shape)
    state: dict[str, Tensor] = {}
    used: set[str] = set()

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise UserError(f"tensor {name} is missing; the folder is not a whole Ling-3.0 checkpoint of this shape")
        used.add(name)
        return tensors[name].float()

    for name in model.state_dict():
        if name.endswith("experts.gate_up"):
            prefix = name.removesuffix("gate_up")
            state[name] = torch.stack(
                [
                    torch.cat([take(f"{prefix}{e}.gate_proj.weight"), take(f"{prefix}{e}.up_proj.weight")])
                    for e in range(shape.num_experts)
                ]
            )
        elif name.endswith("experts.down"):
            prefix = name.removesuffix("down")
            state[name] = torch.stack([take(f"{prefix}{e}.down_proj.weight") for e in range(shape.num_experts)])
        else:
            state[name] = take(name)
    unknown = sorted(set(tensors) - used)
    if unknown:
        raise UserError(f"{len(unknown)} tensors are not part of the model, the first is {unknown[0]}; check config.json")
    model.load_state_dict(state)
    return model


def public_config(shape: LingShape, *, max_length: int, eos: int, pad: int) -> dict[str, Any]:
    """config.json with the public field names of BailingMoeV3ForCausalLM."""
    fields = dataclasses.asdict(shape)
    return {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "torch_dtype": "bfloat16",
        **fields,
        "num_key_value_heads": shape.num_attention_heads,
        "num_kv_heads_for_linear_attn": 0,
        "num_shared_experts": 1,
        "moe_shared_expert_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "q_lora_rank": None,
        "qk_head_dim": shape.qk_nope_head_dim + shape.qk_rope_head_dim,
        "rotary_dim": shape.qk_rope_head_dim,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
        "rope_scaling": None,
        "max_position_embeddings": max_length,
        "gated_attention_proj_granularity_type": "head_wise",
        "no_kda_lora": True,
        "use_kda_lora": False,
        "kda_safe_gate": True,
        "use_mla_nope": False,
        "mtp_use_kda": False,
        "expert_swiglu_limit_list": None,
        "share_expert_swiglu_limit_list": None,
        "hidden_act": "silu",
        "use_bias": False,
        "use_qkv_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": pad,
        "eos_token_id": eos,
    }


def save_model(model: Ling, folder: Path, *, max_length: int, eos: int, pad: int) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = public_config(model.shape, max_length=max_length, eos=eos, pad=pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    # plain text ends at a page's end, an answer at its role's end
    generation = {
        "eos_token_id": [eos, pad],
        "pad_token_id": pad,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 20,
        "do_sample": True,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(public_tensors(model), str(folder / "model.safetensors"), metadata={"format": "pt"})


def load_model(folder: Path) -> Ling:
    """Read a folder that `save_model` wrote, or any Ling-3.0 folder that fits `LingShape`."""
    from safetensors.torch import load_file

    config_path = folder / "config.json"
    if not config_path.exists():
        raise UserError(f"no config.json in {folder}; give a folder in Hugging Face layout")
    config = json.loads(config_path.read_text())
    shape = LingShape(**{f.name: config[f.name] for f in dataclasses.fields(LingShape) if f.name in config})
    return load_public(load_file(str(folder / "model.safetensors")), shape)
