"""The decoder: the only layer loop. Families differ in their configuration and names, not in code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from soloist.config import BlockConfig, KdaConfig, ModelConfig, RopeConfig
from soloist.dist.group import SOLO, Group
from soloist.dist.vocabulary import Logits
from soloist.layers.embedding import Embedding
from soloist.layers.feed_forward import build_feed_forward
from soloist.layers.linear import Linear, Stream, Vector
from soloist.layers.mixers import Cache, Rotation, build_mixer
from soloist.layers.rotary import Rotary
from soloist.models.sharing import share_model
from soloist.ops.rms_norm import rms_norm
from soloist.state.sequence import CacheSpec, PagedSpec, Window


@dataclass(frozen=True)
class Output:
    """What a forward pass leaves for heads and drafters.

    ids [T] and the window they were run in; hidden [T, D] after the final norm; taps: residual stream [T, D] after each
    tapped layer, in ascending layer order.
    """

    ids: torch.Tensor
    window: Window
    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()


class DecoderLayer(nn.Module):
    """Norm, mixer, norm, feed-forward; the residual sum is carried beside the last branch's output."""

    def __init__(self, config: BlockConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.rope = None if isinstance(config.mixer, KdaConfig) else config.mixer.rope
        self.input_norm = Vector(hidden_size, dtype=dtype)
        self.mixer = build_mixer(config.mixer, hidden_size, eps, dtype)
        self.post_norm = Vector(hidden_size, dtype=dtype)
        self.mlp = build_feed_forward(config.mlp, hidden_size, dtype)

    def forward(self, stream: Stream, window: Window, caches: Sequence[Cache], rotation: Rotation | None) -> Stream:
        stream = self.mixer(stream, (self.input_norm.weight, self.eps), window, caches, rotation)
        return self.mlp(stream, (self.post_norm.weight, self.eps), window.rows)


class MtpLayer(nn.Module):
    """A next-token-prediction layer of the checkpoint (NEXTN): joins embedding and hidden state, then one block."""

    def __init__(self, config: BlockConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.embed_norm = Vector(hidden_size, dtype=dtype)
        self.hidden_norm = Vector(hidden_size, dtype=dtype)
        self.in_proj = Linear(2 * hidden_size, {"weight": hidden_size}, dtype)
        self.layer = DecoderLayer(config, hidden_size, eps, dtype)
        self.final_norm = Vector(hidden_size, dtype=dtype)

    @property
    def rope(self) -> RopeConfig | None:
        return self.layer.rope

    def cache_specs(self) -> list[PagedSpec]:
        """Its own caches. They go back by forgetting places, which recurrent states cannot."""
        specs = self.layer.mixer.cache_specs()
        paged = [spec for spec in specs if isinstance(spec, PagedSpec)]
        assert paged == specs, specs
        return paged

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        window: Window,
        caches: Sequence[Cache],
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """Look one token further than the model does.

        Args: embedding [T, D] of the token after each place of the window; hidden [T, D] of the places, after the
            model's final norm or this layer's own.
        Writes: the caches, at the window's places.   Returns: [T, D] after the final norm; the model's head makes it
            the prediction of the token behind the embedded one.
        """
        embedding = rms_norm(embedding, self.embed_norm.weight, self.eps)
        hidden = rms_norm(hidden, self.hidden_norm.weight, self.eps)
        joined = self.in_proj(torch.cat((embedding, hidden), -1))
        stream = self.layer(Stream(joined), window, caches, rotation)
        return stream.normed((self.final_norm.weight, self.eps))


class Decoder(nn.Module):
    """Embedding, layers, final norm, head; and the checkpoint's MTP layers, kept for the NEXTN drafter.

    config is the whole model's, also where a group shares the weights out; columns: the vocabulary, or this rank's share.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, group: Group = SOLO):
        super().__init__()
        self.config, self.dtype, self.group = config, dtype, group
        c = share_model(config, group)
        self.columns = c.vocab_size
        with torch.device(device):
            self.embed = Embedding(c.vocab_size, c.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(DecoderLayer(b, c.hidden_size, c.norm_eps, dtype) for b in c.blocks)
            self.norm = Vector(c.hidden_size, dtype=dtype)
            self.head = Linear(c.hidden_size, {"weight": c.vocab_size}, dtype)
            if c.tied_head:
                self.head.weight = self.embed.weight
            self.mtp = nn.ModuleList(MtpLayer(b, c.hidden_size, c.norm_eps, dtype) for b in c.mtp_blocks)
        self.rotaries: dict[RopeConfig, Rotary] = {
            rope: Rotary(rope, device) for rope in {layer.rope for layer in (*self.layers, *self.mtp)} if rope is not None
        }

    def cache_specs(self) -> list[CacheSpec]:
        """Caches of all layers in order."""
        return [spec for layer in self.layers for spec in layer.mixer.cache_specs()]

    def variant(self, base_length: int) -> int:
        """See `Rotary.variant`: where it differs, equal tokens leave different states."""
        return max((rotary.variant(base_length) for rotary in self.rotaries.values()), default=0)

    def forward(
        self, ids: torch.Tensor, window: Window, caches: Sequence[Cache], taps: Sequence[int] = ()
    ) -> Output:
        """Run one window.

        Args: ids [T] int64; caches as `cache_specs` lists them; taps: layers whose output stream is wanted, ascending.
        Writes: the caches.
        """
        stream = Stream(self.embed(ids))
        rotations = {r: t.tables(window.positions, window.base_length) for r, t in self.rotaries.items()}
        tapped, first = [], 0
        for i, layer in enumerate(self.layers):
            count = len(layer.mixer.cache_specs())
            rotation = None if layer.rope is None else rotations[layer.rope]
            stream = layer(stream, window, caches[first : first + count], rotation)
            first += count
            if i in taps:
                tapped.append(stream.whole)
        hidden = stream.normed((self.norm.weight, self.config.norm_eps))
        return Output(ids, window, hidden, tuple(tapped))

    def score(self, hidden: torch.Tensor) -> Logits:
        """The head's product with hidden [T, D] after the final norm; of a shared one this rank's columns."""
        return Logits(self.head.logits(hidden), self.columns)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, D] after the final norm -> [T, V] fp32, on every rank."""
        return self.score(hidden).whole
