"""The trainable model against transformers' Ling-3.0 and against its own files."""

from __future__ import annotations

import pytest
import torch

from soloist.train.export import load_model, save_model
from soloist.train.model import Ling
from soloist.train.shape import LingShape

TINY = LingShape(
    vocab_size=97,
    hidden_size=64,
    num_hidden_layers=4,
    layer_group_size=2,
    num_attention_heads=2,
    head_dim=32,
    intermediate_size=96,
    moe_intermediate_size=16,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=24,
)


def _model() -> Ling:
    model = Ling(TINY, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float() if p.ndim > 1 else p)
        for layer in model.model.layers[1:]:
            layer.mlp.gate.expert_bias.normal_(-0.9, 0.2)  # all negative: shows a mask of zero instead of minus infinity
    return model


def _ids() -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (2, 75), generator=torch.Generator().manual_seed(1))


def test_exported_folder_gives_transformers_logits(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    model = _model()
    save_model(model, tmp_path, max_length=256, eos=1, pad=0)
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    stored = load_model(tmp_path)
    with torch.no_grad():
        ours, theirs = stored(_ids()), oracle(_ids()).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_a_saved_model_reads_back_whole(tmp_path):
    model = _model()
    save_model(model, tmp_path, max_length=256, eos=1, pad=0)
    again = load_model(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        exact = name.endswith(("A_log", "dt_bias", "expert_bias", "gate.weight"))
        assert torch.allclose(again[name], tensor, rtol=0 if exact else 4e-3, atol=0 if exact else 1e-6), name


def test_one_step_at_a_time_equals_the_whole_sequence():
    model, ids = _model(), _ids()
    with torch.no_grad():
        whole = model(ids)
        state = model.empty_state(2, ids.shape[1])
        steps = torch.stack([model.step(ids[:, t], state, torch.tensor([t])) for t in range(ids.shape[1])], 1)
    assert (whole - steps).norm() / whole.norm() < 1e-5
    with torch.no_grad():
        model.model.layers[0].attention.dt_bias += 1.0
    assert (model(ids) - whole).norm() / whole.norm() > 1e-3, "the comparison must notice a changed decay"
