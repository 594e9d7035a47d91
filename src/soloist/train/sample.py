"""Many sequences generated at once by the trainable model, for on-policy training text and for measuring acceptance.

Prompts are fed through the same one-token step as new tokens, so prompts of any lengths go together without padding
rules.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from soloist.train.loop import autocast
from soloist.train.model import Ling


@dataclasses.dataclass
class Sequences:
    """Generated texts. ids [N, T] int64; prompt [N] and end [N]: the text is ids[prompt:end], its stop token
    included."""

    ids: Tensor
    prompt: Tensor
    end: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: Tensor) -> Sequences:
        """The chosen sequences."""
        return Sequences(self.ids[index], self.prompt[index], self.end[index])


def join(parts: list[Sequences]) -> Sequences:
    """All sequences of equal width in one."""
    return Sequences(torch.cat([p.ids for p in parts]), torch.cat([p.prompt for p in parts]), torch.cat([p.end for p in parts]))


def frozen(model: Ling, device: torch.device) -> Ling:
    """A copy for inference: bf16 matrices on a GPU, as the shipped file has them; fp32 where the file has fp32."""
    from soloist.train.export import load_public, public_tensors

    copy = load_public(public_tensors(model), model.shape).to(device).eval().requires_grad_(False)
    if device.type == "cuda":
        for name, p in copy.named_parameters():
            if p.ndim > 1 and not name.endswith("gate.weight"):
                p.data = p.data.bfloat16()
    return copy


@torch.no_grad()
def generate(
    model: Ling,
    prompts: list[list[int]],
    width: int,
    stop_ids: tuple[int, ...],
    temperatures: list[float],
    seed: int = 0,
) -> Sequences:
    """Continue every prompt to `width` tokens in all, or to its first stop token.

    Args: model a `frozen` one; temperatures one per prompt, 0 for greedy.
    Returns: sequences on the model's device.
    """
    device = model.lm_head.weight.device
    count = len(prompts)
    ids = torch.zeros(count, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : min(len(prompt), width)] = torch.tensor(prompt[:width])
    ids = ids.to(device)
    lengths = torch.tensor([min(len(p), width) for p in prompts], device=device)
    heat = torch.tensor(temperatures, device=device)[:, None]
    state, position = model.empty_state(count, width), torch.zeros(1, dtype=torch.long, device=device)

    def advance() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False) if device.type == "cuda" else autocast(device):
            logits = model.step(ids.index_select(1, position)[:, 0], state, position)
        # the noise of a Gumbel draw; at temperature zero it has no weight
        noise = -torch.log(torch.empty_like(logits).exponential_())
        picked = (logits + heat * noise).argmax(-1)
        position.add_(1)
        given = ids.index_select(1, position)[:, 0]
        ids.index_copy_(1, position, torch.where(position < lengths, given, picked)[:, None])

    torch.manual_seed(seed)
    if device.type == "cuda":
        _replay(advance, width - 1, [ids, position, *(t for s in state for t in s.values())])
    else:
        for _ in range(width - 1):
            advance()
    columns = torch.arange(width, device=device)
    stops = torch.isin(ids, torch.tensor(stop_ids, device=device)) & (columns >= lengths[:, None])
    end = torch.where(stops.any(1), stops.float().argmax(1) + 1, width)
    return Sequences(ids, lengths, end)


def _replay(advance, times: int, buffers: list[Tensor]) -> None:  # type: ignore[no-untyped-def]
    """Capture one step as a CUDA graph and replay it; buffers are put back after the warm-up."""
    before = [b.clone() for b in buffers]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        advance()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    for buffer, old in zip(buffers, before, strict=True):
        buffer.copy_(old)
    del before
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
