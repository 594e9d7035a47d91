"""What a rank holds of a model, which of its columns it picks from, and the line between rank 0 and the others."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch

from soloist.bench.card import load_card
from soloist.bench.flags import find_flags
from soloist.bench.machine import read_machine
from soloist.dist.channel import Follower, Leader, accept, connect, listen
from soloist.dist.group import Lone
from soloist.dist.share import Cut, Share, columns, gather_columns, share
from soloist.dist.vocabulary import Logits
from soloist.errors import RankLost
from soloist.models.decoder import Decoder
from soloist.models.registry import load_decoder, read_config
from soloist.ops.pick import Noise
from soloist.ops.pick_part import pick_part
from soloist.runtime.traffic import token_traffic
from soloist.testing.configs import CONFIGS
from soloist.weights import shapes
from soloist.weights.checkpoint import open_checkpoint
from tests.test_parallel import folder


@pytest.mark.parametrize("kind", ["ling-mtp", "qwen3-moe", "smollm"])
def test_the_ranks_shares_make_up_the_model(kind: str) -> None:
    """Every rank holds about its share, reads no more rows than it holds, and together they hold each weight."""
    checkpoint = open_checkpoint(folder(kind))
    config = read_config(checkpoint.config)
    whole = load_decoder(checkpoint, config, torch.float32, torch.device("cpu"))
    total = sum(p.numel() for p in Decoder(config, torch.float32, torch.device("meta")).parameters())
    ranks = 3 if kind == "smollm" else 2
    parts = [load_decoder(checkpoint, config, torch.float32, torch.device("cpu"), group=Lone(ranks, r)) for r in range(ranks)]
    outlines = [Decoder(config, torch.float32, torch.device("meta"), Lone(ranks, r)) for r in range(ranks)]
    for outline in outlines:
        assert sum(p.numel() for p in outline.parameters()) < 0.75 * total
    rows = torch.cat([part.embed.weight for part in parts])
    assert torch.equal(rows, whole.embed.weight)


def test_a_read_takes_the_part_it_was_asked_for() -> None:
    checkpoint = open_checkpoint(folder("llama"))
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = checkpoint.read(name)
        for dim in range(whole.dim()):
            part = checkpoint.read(name, (Cut(dim, 3, 20, whole.shape[dim]),))
            assert torch.equal(part, whole.narrow(dim, 3, 20)) and part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_a_share_keeps_its_place_when_it_is_multiplied() -> None:
    shares = [share(10, Lone(4, rank)) for rank in range(4)]
    assert shares == [3, 3, 2, 2] and [s.start for s in shares if isinstance(s, Share)] == [0, 3, 6, 8]
    wide = shares[2] * 16
    assert isinstance(wide, Share) and (wide, wide.start, wide.total) == (32, 96, 160)
    assert share(10, Lone(1)) == 10 and not isinstance(share(10, Lone(1)), Share)


class Table(Lone):
    """A group whose other ranks' answers are given."""

    def __init__(self, size: int, rank: int, others: list[torch.Tensor]):
        super().__init__(size, rank)
        self.others = others

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x if rank == self.rank else other for rank, other in enumerate(self.others)])


@pytest.mark.parametrize("noise", [None, (torch.tensor([0.7]), torch.tensor([12]))])
def test_ranks_pick_from_their_columns_what_one_picks_from_all(noise: Noise | None) -> None:
    """Of equals the lowest token, whichever rank has it."""
    scores = torch.randn(16, 101, generator=torch.Generator().manual_seed(1)).mul(3).round()
    places, whole = torch.arange(40, 56), Logits(scores, 101)
    shares = [share(101, Lone(3, rank)) for rank in range(3)]
    parts = [pick_part(columns(scores, s), places, noise, s.start) for s in shares if isinstance(s, Share)]
    for rank in range(3):
        mine = share(101, Table(3, rank, parts))
        assert torch.equal(Logits(columns(scores, mine), mine).pick(places, noise), whole.pick(places, noise))


def test_ranks_are_as_sure_of_the_best_as_one() -> None:
    logits, parts = torch.randn(5, 101, generator=torch.Generator().manual_seed(2)).mul(4), []
    for rank in range(3):
        own = columns(logits, share(101, Lone(3, rank)))
        peak = own.amax(-1)
        parts.append(torch.stack((peak, (own - peak[:, None]).exp().sum(-1))))
    for rank in range(3):
        mine = share(101, Table(3, rank, parts))
        expected = torch.softmax(logits, -1).amax(-1)
        torch.testing.assert_close(Logits(columns(logits, mine), mine).top_chance(), expected)


def test_gathered_columns_are_the_whole_row() -> None:
    x = torch.randn(2, 5)
    padded = [torch.nn.functional.pad(columns(x, share(5, Lone(2, r))), (0, r)) for r in range(2)]
    for rank in range(2):
        mine = share(5, Table(2, rank, padded))
        assert torch.equal(gather_columns(columns(x, mine), mine), x)


def test_a_benchmark_of_a_lone_rank_is_labelled_and_limited_by_its_own_bytes() -> None:
    card, machine = load_card("demo", ["tp_rank_of=4"]), read_machine(1)
    assert "one rank alone" in {flag.kind for flag in find_flags(card, machine, (), (), (), False, False)}
    assert "one rank alone" not in {flag.kind for flag in find_flags(load_card("demo"), machine, (), (), (), False, False)}
    config = read_config(CONFIGS["ling-mtp"])
    whole, part = (token_traffic(config, torch.float32, 64, group).total_bytes for group in (Lone(1), Lone(4)))
    assert part < 0.5 * whole


def test_random_weights_differ_between_ranks_where_they_are_shared_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.CONFIGS, "small", CONFIGS["ling-mtp"])
    checkpoint = open_checkpoint("shapes:small")
    config = read_config(checkpoint.config)
    ranks = [load_decoder(checkpoint, config, torch.bfloat16, torch.device("cpu"), group=Lone(2, rank)) for rank in (0, 1)]
    assert torch.equal(*(rank.norm.weight for rank in ranks))
    one, other = (rank.layers[-1].mlp for rank in ranks)
    assert torch.equal(one.router.weight, other.router.weight)
    assert one.experts.down.shape == other.experts.down.shape and not torch.equal(one.experts.down, other.experts.down)
    assert one.experts.down.float().std().item() == pytest.approx(config.blocks[-1].mlp.width**-0.5, rel=0.05)


def test_flash_is_planned_without_its_weights() -> None:
    """A rank of four holds a quarter of what is shared: 62 GB of 248 in bf16, and the routers and latents once more."""
    config = read_config({**shapes.CONFIGS["ling-3.0-flash"], "num_nextn_predict_layers": 0})
    one = Decoder(config, torch.bfloat16, torch.device("meta"))
    assert sum(p.numel() for p in one.parameters()) == 124_414_211_552
    rank = Decoder(config, torch.bfloat16, torch.device("meta"), Lone(4))
    assert 62.2e9 < sum(p.numel() * p.element_size() for p in rank.parameters()) < 62.9e9


# ---- the line between the ranks ----------------------------------------------------------------------------------------


def joined(on_loss: Any = lambda channel: None) -> tuple[Leader, Follower, socket.socket]:
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        found: list[socket.socket] = []
        stranger = connect("127.0.0.1", port, "wrong", 1, 5)
        joining = threading.Thread(target=lambda: found.append(connect("127.0.0.1", port, "right", 1, 5)))
        joining.start()
        leader = Leader(accept(server, "right", 2, 10, lambda: None), on_loss)
        joining.join()
    stranger.close()
    return leader, Follower(found[0]), found[0]


def test_messages_arrive_in_order_and_a_stranger_gets_none() -> None:
    leader, follower, _ = joined()
    for i in range(100):
        leader.tell({"i": i})
    assert [follower.hear()["i"] for _ in range(100)] == list(range(100))
    leader.close()
    assert follower.hear() is None


def test_the_loss_of_a_rank_is_told_with_its_last_words() -> None:
    losses: list[Leader] = []
    leader, follower, _ = joined(losses.append)
    follower.complain(ValueError("no memory"))
    follower.close()
    end = time.monotonic() + 5
    while not losses and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(RankLost, match="rank 1 of 2 ended: no memory"):
        leader.tell({})


def test_ranks_that_do_not_come_are_named() -> None:
    with listen("127.0.0.1") as server, pytest.raises(RankLost, match=r"ranks \[1, 2\] of 3"):
        accept(server, "token", 3, 0.3, lambda: None)
