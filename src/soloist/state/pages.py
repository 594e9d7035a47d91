"""Page bookkeeping: which pages of every positional cache hold the sequence, in which order.

All positional caches (keys and values, latents, a drafter's own) are indexed by the same page numbers, so one chain
serves them all. Full pages never change and can be shared with snapshots; a shared page is copied before it is written.
"""

from __future__ import annotations

import torch

PAGE_SIZE = 128
"""Positions a page."""


class Pages:
    """The chain of pages of the running sequence, and the counts of who holds which page. All on the host.

    `table` [capacity] int64 mirrors the chain on the device; entries beyond the chain are 0.
    """

    def __init__(self, num_pages: int, device: torch.device):
        self.chain: list[int] = []
        self.table = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return self._holders.count(0)

    @property
    def in_order(self) -> bool:
        """Whether the chain is 0, 1, 2, ...: then a cache can be read without gathering."""
        return self.chain == list(range(len(self.chain)))

    def reserve(self, positions: int) -> None:
        """Make the chain long enough for that many positions."""
        missing = -(-positions // PAGE_SIZE) - len(self.chain)
        if missing <= 0:
            return
        free = [page for page, holders in enumerate(self._holders) if not holders][:missing]
        assert len(free) == missing, (len(free), missing)
        for page in free:
            self._holders[page] = 1
        self._set(self.chain + free)

    def share(self, positions: int) -> tuple[int, ...]:
        """Hold the pages of the first `positions` positions for a snapshot."""
        shared = tuple(self.chain[: -(-positions // PAGE_SIZE)])
        for page in shared:
            self._holders[page] += 1
        return shared

    def release(self, pages: tuple[int, ...]) -> None:
        """Give up pages held by a snapshot."""
        for page in pages:
            assert self._holders[page] > 0, page
            self._holders[page] -= 1

    def adopt(self, pages: tuple[int, ...]) -> None:
        """Let the running sequence continue from the pages of a snapshot, which keeps holding them."""
        for page in pages:
            self._holders[page] += 1
        self.release(tuple(self.chain))
        self._set(list(pages))

    def own(self, position: int) -> tuple[int, int] | None:
        """Make the page that will be written at `position` ours alone.

        Returns: (from, to) if its content must be copied to another page first, otherwise None.
        """
        index = position // PAGE_SIZE
        if index >= len(self.chain) or self._holders[self.chain[index]] == 1:
            return None
        shared = self.chain[index]
        fresh = self._holders.index(0)
        self._holders[fresh], self._holders[shared] = 1, self._holders[shared] - 1
        self._set([*self.chain[:index], fresh, *self.chain[index + 1 :]])
        return shared, fresh

    def clear(self) -> None:
        """Forget the running sequence."""
        self.release(tuple(self.chain))
        self._set([])

    def _set(self, chain: list[int]) -> None:
        self.chain = chain
        self.table[: len(chain)] = torch.tensor(chain, dtype=torch.int64)
