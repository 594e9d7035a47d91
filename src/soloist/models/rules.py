"""From a family's naming rules to one destination for every checkpoint tensor.

A rule is `checkpoint name -> module path:slot`, with {l} for the layer and {e} for the expert. Rules come in groups; a
block takes the groups that its configuration names.
"""

from __future__ import annotations

from soloist.config import BlockConfig, GqaConfig, KdaConfig, MlaConfig, MlpConfig, ModelConfig, MoeConfig

Rules = dict[str, dict[str, str]]
"""Group -> checkpoint name -> destination."""


def groups_of(block: BlockConfig) -> list[str]:
    """The rule groups of one block."""
    return ["block", *_mixer_groups(block.mixer), *_mlp_groups(block.mlp)]


def _mixer_groups(mixer: GqaConfig | MlaConfig | KdaConfig) -> list[str]:
    if isinstance(mixer, KdaConfig):
        return ["kda"]
    if isinstance(mixer, MlaConfig):
        return ["mla", "mla.q_lora" if mixer.q_lora_rank else "mla.q"]
    flags = {"gqa": True, "gqa.qk_norm": mixer.qk_norm, "gqa.qkv_bias": mixer.qkv_bias, "gqa.out_bias": mixer.out_bias}
    return [group for group, on in flags.items() if on]


def _mlp_groups(mlp: MlpConfig | MoeConfig) -> list[str]:
    if isinstance(mlp, MlpConfig):
        return ["mlp", "mlp.bias"] if mlp.bias else ["mlp"]
    flags = {"moe": True, "moe.bias": mlp.selection_bias, "moe.shared": mlp.shared is not None}
    return [group for group, on in flags.items() if on]


def destinations(rules: Rules, config: ModelConfig) -> dict[str, str]:
    """Checkpoint tensor name -> `module path:slot` for the whole model."""
    found = dict(rules["model"])
    if not config.tied_head:
        found.update(rules["head"])
    for i, block in enumerate(config.blocks):
        found.update(_block(rules, block, str(i), f"layers.{i}"))
    for j, block in enumerate(config.mtp_blocks):
        index = str(config.num_layers + j)
        found.update(_block(rules, block, index, f"mtp.{j}.layer"))
        for name, target in rules["mtp"].items():
            found[name.replace("{l}", index)] = f"mtp.{j}.{target}"
    return found


def _block(rules: Rules, block: BlockConfig, index: str, path: str) -> dict[str, str]:
    found = {}
    experts = block.mlp.num_experts if isinstance(block.mlp, MoeConfig) else 0
    for group in groups_of(block):
        for name, target in rules[group].items():
            for e in range(experts) if "{e}" in name else (0,):
                full = name.replace("{l}", index).replace("{e}", str(e))
                found[full] = f"{path}.{target.replace('{e}', str(e))}"
    return found
