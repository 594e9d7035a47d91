"""Several ranks say what one says, end together, and read no more than they hold."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.bench.card import load_card
from soloist.bench.flags import find_flags
from soloist.bench.machine import read_machine
from soloist.cli.answer import summary
from soloist.config import EngineConfig
from soloist.dist.channel import Follower, Leader, accept, connect, listen
from soloist.dist.group import Lone
from soloist.dist.share import Cut, Share, columns, gather_columns, share
from soloist.dist.vocabulary import Logits
from soloist.errors import RankLost, UserError
from soloist.models.decoder import Decoder
from soloist.models.registry import load_decoder, read_config
from soloist.ops.pick import Noise
from soloist.ops.pick_part import pick_part
from soloist.runtime.assemble import resolve
from soloist.runtime.traffic import token_traffic
from soloist.server.generation import plan_meta
from soloist.testing.checkpoints import write_checkpoint
from soloist.testing.configs import CONFIGS
from soloist.weights import shapes
from soloist.weights.checkpoint import open_checkpoint

PROMPT = [5, 17, 88, 3, 41, 17, 60, 5, 17, 88]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
SHAPED = SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True, top_k=20, top_p=0.9, logit_bias={7: 2.0},
                        repetition_penalty=1.1, logprobs=2, min_tokens=3)  # fmt: skip
ODD: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 91, "moe_intermediate_size": 25}
"""Five heads, and experts that do not divide by two, so that whole experts are shared out."""


@cache
def folder(kind: str, odd: bool = False) -> str:
    return str(write_checkpoint(tempfile.mkdtemp(), kind, **(ODD if odd else {})))


def llm(model: str, ranks: int, **settings: Any) -> LLM:
    return LLM(model, device="cpu", dtype="float32", context_length=64, tensor_parallel=ranks, **settings)


@cache
def answers(model: str) -> tuple[list[list[int]], torch.Tensor]:
    """What one rank says."""
    return said_by(llm(model, 1))


def said_by(served: LLM) -> tuple[list[list[int]], torch.Tensor]:
    return [served.generate(PROMPT, asked).token_ids for asked in (GREEDY, SAMPLED, SHAPED)], served.logits(PROMPT)


@pytest.mark.parametrize(
    ("kind", "ranks", "odd"),
    [("ling-mtp", 4, False), ("ling-clamped", 2, True), ("smollm", 2, False), ("llama-biased", 2, False),
     ("qwen3-moe", 4, False)],
)  # fmt: skip
def test_ranks_say_what_one_says(kind: str, ranks: int, odd: bool) -> None:
    """Also where heads, widths and the vocabulary of 101 do not divide."""
    model = folder(kind, odd)
    with llm(model, ranks) as served:
        ids, logits = said_by(served)
        assert (served.plan.ranks, served.plan.exchange) == (f"0 of {ranks}", "gloo")
    assert ids == answers(model)[0]
    torch.testing.assert_close(logits, answers(model)[1], rtol=1e-4, atol=1e-4)


def test_ranks_say_it_with_every_drafter(tmp_path: Path) -> None:
    """And a request that was ended halfway leaves the ranks in step."""
    plain = [llm("nano", 1).generate("Once upon a time", asked).token_ids for asked in (GREEDY, SAMPLED)]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"script": [t if i % 3 else 0 for i, t in enumerate(plain[0])]}))
    with llm("nano", 2) as served:
        for settings in ({"drafter": "ngram", "draft_width": 4}, {"drafter": "mtp"}, {"drafter": "dspark", "draft_width": 3},
                         {"drafter": "scripted", "drafter_path": str(script), "draft_width": 5}):  # fmt: skip
            twin = served.with_drafter(**settings)  # type: ignore[arg-type]
            stream = twin.stream("Once upon a time", GREEDY)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            for asked, expected in zip((GREEDY, SAMPLED), plain, strict=True):
                assert twin.generate("Once upon a time", asked).token_ids == expected, settings


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")
@pytest.mark.parametrize("kind", ["ling-mtp", "llama"])
def test_gpus_say_what_one_says(kind: str) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "context_length": 64}
    with LLM(folder(kind), **settings) as one:
        ids, logits = said_by(one)
    with LLM(folder(kind), tensor_parallel=min(4, torch.cuda.device_count()), **settings) as several:
        found, parallel = said_by(several)
        print(several.plan.exchange)
    assert found == ids
    torch.testing.assert_close(parallel, logits, rtol=1e-3, atol=1e-3)


def test_a_rank_that_is_killed_ends_the_others_within_seconds() -> None:
    served = llm(folder("llama"), 4)
    children = children_of(os.getpid())
    assert len(children) == 3
    stream = served.stream(PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    os.kill(children[1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RankLost, match=r"rank \d of 4 ended without a word"):
        for _ in stream:
            pass
    served.close()
    assert time.monotonic() - begun < 10
    assert not [pid for pid in children if is_alive(pid)], "a rank lives on"
    with pytest.raises(UserError, match="closed"):
        served.generate(PROMPT, GREEDY)


def test_a_server_that_loses_a_rank_tells_the_client_and_exits() -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("msgspec")
    port = free_port()
    command = [sys.executable, "-m", "soloist", "serve", "-m", folder("llama"), "--device", "cpu", "--port", str(port),
               "--tensor-parallel", "2", "--context-length", "512"]  # fmt: skip
    server = subprocess.Popen(command, env=with_source(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert server.stderr is not None
    assert any("is ready" in line for line in server.stderr)
    (child,) = children_of(server.pid)
    body = {"model": Path(folder("llama")).name, "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True,
            "stream": True}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    assert first.startswith(b"data: {"), first
    os.kill(child, signal.SIGKILL)
    begun = time.monotonic()
    assert b'"error"' in answer.read() and answer.status == 200
    drain = threading.Thread(target=server.stderr.read, daemon=True)
    drain.start()
    assert server.wait(20) == 1
    assert time.monotonic() - begun < 10


def test_ranks_end_when_rank_0_is_killed() -> None:
    code = f"from soloist import LLM; LLM({folder('llama')!r}, device='cpu', tensor_parallel=2); print('up', flush=True); input()"
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=with_source())
    assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
    (child,) = children_of(leader.pid)
    leader.kill()
    leader.wait()
    end = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(child)


def test_torchrun_starts_the_ranks_of_one_model(tmp_path: Path) -> None:
    """Two launchers that meet at a rendezvous stand for two machines: each starts one rank."""
    script = tmp_path / "ask.py"
    script.write_text(
        "from soloist import LLM, SamplingParams\n"
        f"llm = LLM({folder('llama')!r}, device='cpu', dtype='float32', context_length=64, tensor_parallel=2)\n"
        f"print(llm.generate({PROMPT}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).token_ids)\n"
        "llm.close()\n"
    )
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=soloist",
               "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", str(script)]  # fmt: skip
    launchers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=with_source(), text=True) for _ in range(2)]
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert "".join(outputs).strip() == str(answers(folder("llama"))[0][0])


@pytest.mark.parametrize(
    ("kind", "ranks", "message"),
    [("ling-tiny", 8, "cannot share 4 attention heads"), ("smollm", 4, "9 query heads on 3 key/value heads"),
     ("qwen3", 8, "4 query heads on 1 key/value heads")],
)  # fmt: skip
def test_more_ranks_than_heads_are_refused_before_anything_starts(kind: str, ranks: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm(folder(kind), ranks)
    assert not children_of(os.getpid())


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(UserError, match="leave out tensor_parallel"):
        EngineConfig("x", tensor_parallel=2, tp_rank_of=4)
    with pytest.raises(UserError, match="names one GPU"):
        EngineConfig("x", tensor_parallel=2, device="cuda:1")


def test_a_rank_too_large_for_its_memory_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soloist.runtime.assemble.free_bytes", lambda device, ranks: 100_000)
    with pytest.raises(UserError, match="weights 0.00 GB.*raise tensor_parallel"):
        llm(folder("llama"), 1)


# ---- shares ------------------------------------------------------------------------------------------------------------


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


def test_gathered_columns_are_the_whole_row() -> None:
    x = torch.randn(2, 5)
    padded = [torch.nn.functional.pad(columns(x, share(5, Lone(2, r))), (0, r)) for r in range(2)]
    for rank in range(2):
        mine = share(5, Table(2, rank, padded))
        assert torch.equal(gather_columns(columns(x, mine), mine), x)


def test_a_lone_rank_runs_and_says_that_it_is_alone() -> None:
    with LLM(folder("ling-mtp"), device="cpu", context_length=64, tp_rank_of=4, drafter="mtp", draft_width=2) as served:
        said = served.generate(PROMPT, GREEDY).token_ids
        assert len(said) == 12 and said != answers(folder("ling-mtp"))[0][0], "sums must matter"
        assert "communication is left out" in served.plan.ranks
        assert "communication is left out" in summary(served.generate(PROMPT, GREEDY), served.plan)
        assert "communication is left out" in plan_meta(served)["ranks"]
    whole, _ = resolve(EngineConfig(folder("ling-mtp"), device="cpu"), open_checkpoint(folder("ling-mtp")))
    assert served.plan.parameter_bytes < 0.5 * whole.parameter_bytes


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
    flash = {**CONFIGS["ling-flash"], "vocab_size": 157184, "hidden_size": 2560, "num_hidden_layers": 42, "head_dim": 128,
             "num_attention_heads": 32, "num_key_value_heads": 32, "layer_group_size": 6, "intermediate_size": 6144,
             "num_experts": 512, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "n_group": 8, "topk_group": 4,
             "moe_shared_expert_intermediate_size": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "qk_head_dim": 192, "v_head_dim": 128, "rotary_dim": 64, "expert_swiglu_limit_list": None,
             "share_expert_swiglu_limit_list": None}  # fmt: skip
    config = read_config(flash)
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


# ---- processes ---------------------------------------------------------------------------------------------------------


def with_source() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def children_of(pid: int) -> list[int]:
    """Living ranks, in the order they were started."""
    return sorted(child for child, parent in _processes() if parent == pid and _is_rank(child))


def _processes() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if fields[0] != "Z":
                yield int(entry.name), int(fields[1])


def _is_rank(pid: int) -> bool:
    try:
        return b"soloist.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    return any(process == pid for process, _ in _processes())
