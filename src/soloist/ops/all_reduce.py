"""The sum of all ranks' rows for messages of a round, in one kernel: every rank writes its rows to all peers and adds what
arrives, in rank order, so all ranks get the same bits. And the same without adding: every rank gets everybody's values.

A word carries its own proof of arrival: 32 bits of value and a 32-bit epoch, written and read as one. Nothing has to be
fenced, counted or cleared, and two buffers in turn suffice: who sends the words of epoch e + 2 has received every peer's
of e + 1, and a peer sends those only after it has read e.
"""

from __future__ import annotations

import torch

from soloist.ops.gpu.all_reduce import exchange

BLOCK = 512
"""Values a program sums; each keeps an epoch of its own, so programs wait for nobody of their own rank."""

TURNS = 2


class PeerSum:
    """Sums x over ranks that can write each other's memory.

    Args: inboxes [size] int64: the address of every rank's inbox, as this rank reaches it, each an int64 tensor [TURNS,
        size, most_values] that began as zeros; rank: this one's number.
    Writes, in a call: `missed` [1] int32 in the host's memory, 1 if a peer's words did not come, and then the sum is wrong.
    """

    def __init__(self, inboxes: torch.Tensor, rank: int, most_values: int):
        assert most_values % BLOCK == 0, most_values
        self.inboxes, self.rank, self.most_values = inboxes, rank, most_values
        self.epochs = torch.zeros(most_values // BLOCK, dtype=torch.int32, device=inboxes.device)
        self.missed = torch.zeros(1, dtype=torch.int32, pin_memory=inboxes.is_cuda)
        self.inbox: torch.Tensor | None = None  # whoever allocated it leaves it here, so that it lives as long

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over ranks of x, in fp32 in rank order, and of this rank's residual where given; rounded once to x's
        dtype. x holds at most `most_values` values.
        """
        return exchange(self, x.contiguous(), residual)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, of a dtype that fp32 holds exactly: [size, *x.shape]."""
        return exchange(self, x.contiguous(), gather=True)

    def give_up(self) -> None:
        """Free kernels that wait for a peer, now and later: it is gone."""
        self.missed.fill_(1)


def inbox_values(size: int, most_values: int) -> int:
    """int64 words of a rank's inbox."""
    return TURNS * size * most_values
