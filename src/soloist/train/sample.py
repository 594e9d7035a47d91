"""Many sequences generated at once by a frozen target, for on-policy training text and for measuring acceptance.

Prompts are fed through the same one-token step as new tokens, so prompts of any lengths go together without padding
rules.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from tqdm import tqdm

from soloist.train.loop import autocast
from soloist.train.model import Ling
from soloist.train.target import Target

# sequences generated at once, and of the memory what their states may take: capturing a graph needs them twice
MOST_AT_ONCE, STATE_SHARE = 4096, 0.25
CPU_BYTES = 8 << 30
QUIET_S = 5


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


def write(
    target: Target,
    prompts: list[list[int]],
    width: int,
    stop_ids: tuple[int, ...],
    seed: int,
    temperatures: tuple[float, ...] = (0.0,),
) -> Sequences:
    """What the target writes after each prompt, `width` tokens in all; the temperatures take turns. A terminal is shown how
    far it is: on a CPU it may take hours.
    """
    parts, at_once = [], _at_once(target, width)
    with tqdm(total=len(prompts), desc="writing", unit="text", delay=QUIET_S, disable=None, leave=False) as bar:
        for start in range(0, len(prompts), at_once):
            some = prompts[start : start + at_once]
            heat = [temperatures[(start + i) % len(temperatures)] for i in range(len(some))]
            parts.append(generate(target, some, width, stop_ids, heat, seed + start))
            bar.update(len(some))
    return join(parts)


def _at_once(target: Target, width: int) -> int:
    """Sequences whose state and logits fit well; the same on every day of one machine."""
    device = target.head.device
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else CPU_BYTES
    each = sum(t.nbytes for layer in target.empty_state(1, width) for t in layer.values()) + 16 * target.head.shape[0]
    return max(1, min(MOST_AT_ONCE, int(memory * STATE_SHARE) // each))


@torch.no_grad()
def generate(
    model: Target,
    prompts: list[list[int]],
    width: int,
    stop_ids: tuple[int, ...],
    temperatures: list[float],
    seed: int = 0,
) -> Sequences:
    """Continue every prompt to `width` tokens in all, or to its first stop token.

    Args: temperatures one per prompt, 0 for greedy.
    Returns: sequences on the model's device.
    """
    device = model.head.device
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
    del graph
    torch.cuda.empty_cache()
