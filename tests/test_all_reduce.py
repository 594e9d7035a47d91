"""The one-shot sum, rank after rank in one process: everybody's words lie in everybody's inbox before the first reads."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from soloist.ops.all_reduce import BLOCK, PeerSum, inbox_values  # noqa: E402
from soloist.ops.gpu.all_reduce import exchange  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks take turns in the interpreter only")

MOST = 2 * BLOCK


def ranks(size: int) -> tuple[list[PeerSum], list[torch.Tensor]]:
    inboxes = [torch.zeros(inbox_values(size, MOST), dtype=torch.int64) for _ in range(size)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes])
    return [PeerSum(addresses, rank, MOST) for rank in range(size)], inboxes


def summed(group: list[PeerSum], xs: list[torch.Tensor], residual: torch.Tensor | None = None) -> list[torch.Tensor]:
    for rank, x in zip(group, xs, strict=True):
        exchange(rank, x, None, push=True, pull=False)
    return [exchange(rank, x, residual, push=False, pull=True, patience=0) for rank, x in zip(group, xs, strict=True)]


@pytest.mark.parametrize(("size", "T"), [(2, 1), (4, 3), (3, 10)])
def test_every_rank_gets_the_sum_in_rank_order(size: int, T: int) -> None:
    """Call after call, with other values and other widths: old words are never taken for new ones."""
    group, _kept = ranks(size)
    for call in range(5):
        rows = T if call % 2 else 1
        xs = [torch.randn(rows, 100, generator=torch.Generator().manual_seed(10 * call + r)) for r in range(size)]
        residual = torch.randn(rows, 100) if call == 3 else None
        expected = xs[0]
        for x in xs[1:]:
            expected = expected + x
        expected = expected if residual is None else expected + residual
        for found in summed(group, xs, residual):
            assert torch.equal(found, expected)
        assert not any(int(rank.missed) for rank in group)


def test_every_rank_gets_everybodys_values() -> None:
    group, _kept = ranks(3)
    for call in range(3):
        xs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * call + r)) for r in range(3)]
        for rank, x in zip(group, xs, strict=True):
            exchange(rank, x, push=True, pull=False)
        for rank, x in zip(group, xs, strict=True):
            assert torch.equal(exchange(rank, x, gather=True, push=False, patience=0), torch.stack(xs))


def test_nobody_waits_for_a_rank_that_was_given_up() -> None:
    group, _kept = ranks(2)
    group[0].give_up()
    exchange(group[0], torch.ones(1, 100), patience=1 << 30)


def test_words_that_did_not_come_are_noticed() -> None:
    group, _kept = ranks(2)
    x = torch.ones(1, 100)
    exchange(group[0], x, None, push=True, pull=False)
    exchange(group[0], x, None, push=False, pull=True, patience=3)
    assert int(group[0].missed) == 1
