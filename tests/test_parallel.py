"""Several ranks say what one says, end together, and read no more than they hold."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.cli.answer import summary
from soloist.config import EngineConfig
from soloist.errors import RankLost, UserError
from soloist.runtime.assemble import measure_exchange, resolve
from soloist.server.generation import plan_meta
from soloist.testing.checkpoints import write_checkpoint
from soloist.testing.configs import CONFIGS
from soloist.weights.checkpoint import open_checkpoint
from tests.dspark_files import write_drafter
from tests.naive_dspark import Facts

Launcher = subprocess.Popen[str]

PROMPT = [5, 17, 88, 3, 41, 17, 60, 5, 17, 88]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
SHAPED = SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True, top_k=20, top_p=0.9, logit_bias={7: 2.0},
                        repetition_penalty=1.1, logprobs=2, min_tokens=3)  # fmt: skip
ODD: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 5, "intermediate_size": 91, "moe_intermediate_size": 25}
"""Five heads, and experts that do not divide by two, so that whole experts are shared out."""


@cache
def folder(kind: str, odd: bool = False) -> str:
    return str(write_checkpoint(tempfile.mkdtemp(), kind, **sizes(kind, odd)))


def sizes(kind: str, odd: bool) -> dict[str, Any]:
    return {name: value for name, value in ODD.items() if odd and name in CONFIGS[kind]}


def llm(model: str, ranks: int, **settings: Any) -> LLM:
    """A thread a rank: more would wait for each other on the few cores that test."""
    return LLM(model, device="cpu", dtype="float32", context_length=64, threads=1, tensor_parallel=ranks, **settings)


@cache
def answers(model: str) -> tuple[list[list[int]], torch.Tensor]:
    """What one rank says."""
    return said_by(llm(model, 1))


def said_by(served: LLM) -> tuple[list[list[int]], torch.Tensor]:
    return [served.generate(PROMPT, asked).token_ids for asked in (GREEDY, SAMPLED, SHAPED)], served.logits(PROMPT)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "ranks", "odd"),
    [("ling-mtp", 4, True), slow("ling-mtp", 2, False), slow("ling-mtp", 4, False), slow("ling-clamped", 2, True),
     slow("smollm", 2, False), slow("smollm", 3, False), slow("llama", 2, False), slow("llama", 4, False),
     slow("llama-biased", 2, False), slow("qwen3", 2, False), slow("qwen3", 4, False), slow("qwen3-tied", 2, False),
     slow("qwen3-moe", 2, False), slow("qwen3-moe", 4, False)],
)  # fmt: skip
def test_ranks_say_what_one_says(kind: str, ranks: int, odd: bool) -> None:
    """Also where heads, widths and the vocabulary of 101 do not divide."""
    model = folder(kind, odd)
    with llm(model, ranks) as served:
        ids, logits = said_by(served)
        assert (served.plan.ranks, served.plan.exchange) == (f"0 of {ranks}", "gloo")
    assert ids == answers(model)[0]
    torch.testing.assert_close(logits, answers(model)[1], rtol=1e-4, atol=1e-4)


def with_dspark(model: Path, kind: str, odd: bool) -> str:
    write_drafter(model / "dspark", Facts(), "deepspec", 6)
    return str(write_checkpoint(model, kind, num_hidden_layers=6, **sizes(kind, odd)))


@pytest.mark.parametrize(
    ("kind", "ranks", "odd"),
    [("nano", 2, False), *(slow(*each) for each in (("nano", 4, False), ("ling-mtp", 4, True), ("llama", 2, True),
     ("llama", 4, False), ("qwen3", 2, True), ("qwen3", 4, False), ("qwen3-moe", 4, False)))],
)  # fmt: skip
def test_ranks_say_it_with_every_drafter(tmp_path: Path, kind: str, ranks: int, odd: bool) -> None:
    """And a request that was ended halfway leaves the ranks in step."""
    model = kind if kind == "nano" else with_dspark(tmp_path / "model", kind, odd)
    plain = [llm(model, 1).generate(PROMPT, asked).token_ids for asked in (GREEDY, SAMPLED)]
    assert plain[0] != plain[1]
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"script": [t if i % 3 else 0 for i, t in enumerate(plain[0])]}))
    drafters: list[dict[str, Any]] = [
        {"drafter": "ngram", "draft_width": 4}, {"drafter": "dspark", "draft_width": 3},
        {"drafter": "scripted", "drafter_path": str(script), "draft_width": 5},
    ]  # fmt: skip
    if kind in ("nano", "ling-mtp"):
        drafters.append({"drafter": "mtp"})
    with llm(model, ranks) as served:
        for settings in drafters:
            twin = served.with_drafter(**settings)
            stream = twin.stream(PROMPT, GREEDY)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            for asked, expected in zip((GREEDY, SAMPLED), plain, strict=True):
                assert twin.generate(PROMPT, asked).token_ids == expected, settings


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
    served = llm(folder("smollm"), 3)
    children = children_of(os.getpid())
    assert len(children) == 2
    stream = served.stream(PROMPT, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    os.kill(children[1], signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 2 of 3 ended without a word"):
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
    endpoint = f"127.0.0.1:{free_port()}"
    launchers = [launch(tmp_path, endpoint, "127.0.0.1") for _ in range(2)]
    assert_said(launchers)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root, for network namespaces")
def test_ranks_meet_over_a_network(tmp_path: Path) -> None:
    """Each in a network namespace of its own, which has one address and one way to the other."""
    names, hosts, links = ("soloist-a", "soloist-b"), ("10.213.7.1", "10.213.7.2"), ("va", "vb")
    if ip("netns", "add", names[0]):
        pytest.skip("network namespaces are not permitted here")
    try:
        assert not ip("netns", "add", names[1])
        assert not ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        launchers = []
        for name, host, link in zip(names, hosts, links, strict=True):
            assert not ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            assert not ip("-n", name, "link", "set", "lo", "up") and not ip("-n", name, "link", "set", link, "up")
        for number, (name, host, link) in enumerate(zip(names, hosts, links, strict=True)):
            flags = [f"--rdzv-conf=is_host={int(number == 0)}"]
            prefix = ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}"]
            launchers.append(launch(tmp_path, f"{hosts[0]}:29500", host, prefix, flags))
        assert_said(launchers)
    finally:
        for name in names:
            ip("netns", "del", name)


def ip(*command: str) -> int:
    return subprocess.run(["ip", *command], stderr=subprocess.DEVNULL).returncode


def launch(where: Path, endpoint: str, host: str, prefix: Sequence[str] = (), flags: Sequence[str] = ()) -> Launcher:
    """torchrun on one of two machines, which starts one rank."""
    script = where / "ask.py"
    script.write_text(
        "from soloist import LLM, SamplingParams\n"
        f"llm = LLM({folder('llama')!r}, device='cpu', dtype='float32', context_length=64, tensor_parallel=2)\n"
        f"print(llm.generate({PROMPT}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).token_ids)\n"
        "llm.close()\n"
    )
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=soloist",
               "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--local-addr={host}", *flags, str(script)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=with_source(), text=True)


def assert_said(launchers: list[Launcher]) -> None:
    outputs = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert "".join(outputs).strip() == str(answers(folder("llama"))[0][0])


@pytest.mark.slow
def test_ranks_tell_how_their_sums_travel_without_a_model() -> None:
    assert measure_exchange(EngineConfig("nano", tensor_parallel=3), torch.device("cpu")) == "gloo"


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


def test_a_lone_rank_runs_and_says_that_it_is_alone() -> None:
    with LLM(folder("ling-mtp"), device="cpu", context_length=64, tp_rank_of=4, drafter="mtp", draft_width=2) as served:
        said = served.generate(PROMPT, GREEDY).token_ids
        assert len(said) == 12 and said != answers(folder("ling-mtp"))[0][0], "sums must matter"
        assert "communication is left out" in served.plan.ranks
        assert "communication is left out" in summary(served.generate(PROMPT, GREEDY), served.plan)
        assert "communication is left out" in plan_meta(served)["ranks"]
    whole, _ = resolve(EngineConfig(folder("ling-mtp"), device="cpu"), open_checkpoint(folder("ling-mtp")))
    assert served.plan.parameter_bytes < 0.5 * whole.parameter_bytes


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
