"""How a model's dimensions are shared out over ranks: heads, widths, experts, vocabulary. Everything else follows.

A layer built from a shared configuration holds its share of the weights and of the caches. What is narrow stays whole on
every rank: norms, routers, MLA's latents; they cost less to compute again than to exchange.
"""

from __future__ import annotations

from dataclasses import replace

from soloist.config import BlockConfig, GqaConfig, KdaConfig, Mixer, MlaConfig, MlpConfig, ModelConfig, MoeConfig
from soloist.dist.group import Group
from soloist.dist.share import Share, share
from soloist.errors import UserError


def share_model(config: ModelConfig, group: Group) -> ModelConfig:
    """One rank's configuration.   Raises: UserError for more ranks than there are heads, or other parts, to share."""
    if group.size == 1:
        return config
    return replace(
        config,
        vocab_size=_share("vocabulary entries", config.vocab_size, group),
        blocks=tuple(share_block(block, group) for block in config.blocks),
        mtp_blocks=tuple(share_block(block, group) for block in config.mtp_blocks),
    )


def share_block(block: BlockConfig, group: Group) -> BlockConfig:
    return BlockConfig(share_mixer(block.mixer, group), share_feed_forward(block.mlp, group))


def share_mixer(mixer: Mixer, group: Group) -> Mixer:
    if isinstance(mixer, GqaConfig):
        return share_attention(mixer, group)
    assert isinstance(mixer, MlaConfig | KdaConfig)
    return replace(mixer, num_heads=_share("attention heads", mixer.num_heads, group))


def share_attention(c: GqaConfig, group: Group) -> GqaConfig:
    """Query heads stay with their key and value head: whole groups go to a rank or, where there are fewer than ranks,
    several ranks share a group and hold its key and value head each.
    """
    G, per_group = c.num_kv_heads, c.num_heads // c.num_kv_heads
    if group.size == 1:
        return c
    if group.size <= G:
        kv = share(G, group)
        return replace(c, num_heads=kv * per_group, num_kv_heads=kv)
    if group.size % G or group.size // G > per_group:
        raise UserError(
            f"tensor_parallel={group.size} cannot share {c.num_heads} query heads on {G} key/value heads: it must be at "
            f"most {G}, or {G} times at most {per_group}"
        )
    ranks = group.size // G
    number, place = divmod(group.rank, ranks)
    each, more = divmod(per_group, ranks)
    start = number * per_group + each * place + min(place, more)
    heads = Share(each + (place < more), start, c.num_heads, group)
    return replace(c, num_heads=heads, num_kv_heads=Share(1, number, G, group))


def share_feed_forward(mlp: MlpConfig | MoeConfig, group: Group) -> MlpConfig | MoeConfig:
    """Every expert's width is shared, so that all ranks work on every token. Where that does not come out even and the
    number of experts does, whole experts are shared instead.
    """
    if isinstance(mlp, MlpConfig):
        return share_mlp(mlp, group)
    shared = None if mlp.shared is None else share_mlp(mlp.shared, group)
    if mlp.width % group.size and not mlp.num_experts % group.size:
        return replace(mlp, num_experts=share(mlp.num_experts, group), shared=shared)
    return replace(mlp, width=_share("units of an expert's width", mlp.width, group), shared=shared)


def share_mlp(mlp: MlpConfig, group: Group) -> MlpConfig:
    return replace(mlp, width=_share("units of the feed-forward width", mlp.width, group))


def _share(what: str, total: int, group: Group) -> int:
    if total < group.size:
        raise UserError(f"tensor_parallel={group.size} cannot share {total} {what}; lower it to at most {total}")
    return share(total, group)
