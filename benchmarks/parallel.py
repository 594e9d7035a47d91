"""Tensor parallelism, measured: sums, texts, and the shapes of Ling-3.0-flash, each in processes of its own.

    python benchmarks/parallel.py --ranks 4 --output parallel.json            # on four GPUs: all sections
    python benchmarks/parallel.py flash --ranks 4 --requests 100              # one of them
    python benchmarks/parallel.py alone --ranks 4 --output alone.json         # on one GPU: rank 0 of 4

sums: the one-shot exchange against NCCL, right and fast, from 5 KB to 64 KB. texts: several ranks say what one says, by
either exchange and with every drafter. alone: rank 0 without the others and without communication. flash: all ranks;
where both ran, what communication adds to a round is their difference, and the profile of a plain round has it by itself
(`exchange`), with the waiting for the slowest rank. The weights are random, so the rows of a round are
verified as for real, but what is accepted is scripted or computed, and called synthetic.

A section that fails or takes too long leaves its error in the file, and the others go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from soloist import LLM, SamplingParams
from soloist.bench.limit import memory_rate
from soloist.bench.machine import read_machine
from soloist.bench.pinned import pinned_script, write_script
from soloist.bench.profile import profile, random_ids
from soloist.runtime.traffic import token_traffic

SECTIONS = ("sums", "texts", "alone", "flash")
KILOBYTES = (5, 10, 20, 40, 64)
ROWS = (2, 4, 6, 8, 9)
NEXTN, DSPARK = (3, 3.25), (8, 5.3)
"""Tokens drafted a round, and the mean number emitted in the reference article."""

PROMPT = [5, 17, 88, 3, 41, 17, 60, 5, 17, 88]
ASKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    "shaped": SamplingParams(temperature=0.9, seed=5, max_tokens=16, ignore_eos=True, top_k=20, top_p=0.9, logprobs=2),
}
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"drafter": "ngram", "draft_width": 4}, {"drafter": "mtp", "draft_width": 3}, {"drafter": "dspark", "draft_width": 3},
)  # fmt: skip


# ---- sums --------------------------------------------------------------------------------------------------------------


def sums(args: argparse.Namespace) -> dict[str, Any]:
    """Start a process a rank, and collect what rank 0 found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "sums.json"
        ranks = []
        for rank in range(args.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            ranks.append(subprocess.Popen(command(args, "rank-of-sums", found), env=environment))
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with codes {codes}")
        return dict(json.loads(found.read_text()))


def rank_of_sums(args: argparse.Namespace) -> dict[str, Any]:
    from soloist.dist.group import Ranks
    from soloist.dist.launch import local_rank, open_group
    from soloist.dist.peers import peer_sum

    on_gpu = args.device == "cuda"
    device = torch.device(f"cuda:{local_rank(args.ranks)}" if on_gpu else "cpu")
    group = open_group(args.ranks, None, device, {})
    assert isinstance(group, Ranks)
    found: dict[str, Any] = {"chosen": group.exchange, "sizes": []}
    group.one_shot, one_shot = None, None
    if on_gpu:
        one_shot, found["no_one_shot"] = peer_sum(group, device)
    for kilobytes in KILOBYTES:
        found["sizes"].append({"kilobytes": kilobytes, **exchanges(group, one_shot, kilobytes * 512, device)})
    group.close()
    return found


def exchanges(group: Any, one_shot: Any, count: int, device: torch.device) -> dict[str, Any]:
    """Of `count` bf16 values: microseconds a call by every way, and whether the one-shot sum is right to the bit."""
    import torch.distributed as dist

    def drawn(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * group.size + group.rank)
        return torch.randn(1, count, generator=generator).to(device, torch.bfloat16)

    x, found = drawn(0), dict[str, Any]()
    found["library_us"] = slowest(lambda: dist.all_reduce(x), device)
    found["library_in_rank_order_us"] = slowest(lambda: group.all_reduce(x), device)
    if one_shot is None:
        return found
    found["one_shot_us"] = slowest(lambda: one_shot(x), device)
    part = torch.ones(1, 3, device=device)
    found["pick_one_shot_us"], found["pick_library_us"] = (
        slowest(lambda: one_shot.gather(part), device), slowest(lambda: group.all_gather(part), device)
    )  # fmt: skip
    wrong = 0
    for seed in range(200):
        x = drawn(seed)
        wrong += not torch.equal(one_shot(x), group.all_reduce(x))
    inputs = [drawn(seed) for seed in range(300, 340)]
    expected = [group.all_reduce(each) for each in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [one_shot(each) for each in inputs]
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize(device)
        wrong += sum(not torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    return {**found, "compared": 200 + 50 * len(inputs), "wrong": wrong, "missed": int(one_shot.missed)}


def slowest(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds a call; on a GPU in a graph, of the slowest rank."""
    if device.type == "cuda":
        from soloist.dist.peers import slowest_us

        return slowest_us(call, device)
    call()
    begun = time.perf_counter()
    for _ in range(20):
        call()
    return (time.perf_counter() - begun) / 20 * 1e6


# ---- texts -------------------------------------------------------------------------------------------------------------


def texts(args: argparse.Namespace) -> dict[str, Any]:
    """Several ranks against one, in fp32, where rounding hardly ever decides."""
    from soloist.testing.checkpoints import write_checkpoint

    settings: dict[str, Any] = {"device": args.device, "dtype": "float32", "context_length": 128}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("ling-mtp", "llama", "qwen3"):
            model = str(write_checkpoint(Path(folder) / kind, kind))
            with LLM(model, **settings) as one:
                expected = said_by(one)
            for exchange in ("nccl", "one-shot") if args.device == "cuda" else ("gloo",):
                os.environ["SOLOIST_EXCHANGE"] = exchange if exchange != "gloo" else "auto"
                ranks = ranks_for(kind, args.ranks)
                with LLM(model, tensor_parallel=ranks, **settings) as several:
                    same = {name: ids == expected[name] for name, ids in said_by(several).items()}
                    found[f"{kind}, {ranks} ranks, {exchange}"] = {"same": same, "exchange": several.plan.exchange}
    os.environ["SOLOIST_EXCHANGE"] = "auto"
    with LLM("nano", **settings) as one:
        expected = said_by(one)
    with LLM("nano", tensor_parallel=args.ranks, **settings) as several:
        for drafter in DRAFTERS:
            said = said_by(several.with_drafter(**drafter))
            found[f"nano, {args.ranks} ranks, {drafter['drafter']}"] = {n: ids == expected[n] for n, ids in said.items()}
    return found


def ranks_for(kind: str, ranks: int) -> int:
    """Small checkpoints have few heads."""
    return min(ranks, 2) if kind == "qwen3" else ranks


def said_by(llm: LLM) -> dict[str, list[int]]:
    return {name: llm.generate(PROMPT, params).token_ids for name, params in ASKED.items()}


# ---- shapes ------------------------------------------------------------------------------------------------------------


def alone(args: argparse.Namespace) -> dict[str, Any]:
    return rounds(args, {"tp_rank_of": args.ranks})


def flash(args: argparse.Namespace) -> dict[str, Any]:
    return rounds(args, {"tensor_parallel": args.ranks})


def rounds(args: argparse.Namespace, ranks: dict[str, int]) -> dict[str, Any]:
    """Plain decoding, windows of several rows, and rounds of both drafters, behind a long prompt of random ids."""
    begun = time.perf_counter()
    context = args.context + args.output_tokens + 64
    with LLM(args.model, progress=True, device=args.device, context_length=context, prefill_chunk=args.prefill_chunk,
             prefix_cache_bytes=0, **ranks) as llm, tempfile.TemporaryDirectory() as folder:  # fmt: skip
        rate, dtype = memory_rate(llm), getattr(torch, llm.plan.dtype)
        traffic = token_traffic(llm.model_config, dtype, args.context + args.output_tokens // 2, llm.group)
        found: dict[str, Any] = {
            "plan": {**dataclasses.asdict(llm.plan), "model": Path(args.model).name},
            "loaded_s": time.perf_counter() - begun, "read_bytes_per_s": rate,
            "plain_limit_ms": traffic.total_bytes / rate * 1e3, "variants": {},
        }  # fmt: skip
        if llm.plan.caveat:
            found["caveat"] = llm.plan.caveat
        if args.device == "cuda":
            found["memory_bytes"] = torch.cuda.max_memory_allocated()
        if args.device == "cuda":
            found["profile"] = dataclasses.asdict(profile(llm, prompt_of(llm, args, 0), 8))
        for name, variant, emitted in variants(llm, args, Path(folder)):
            found["variants"][name] = measured(variant, args, emitted)
            print(name, json.dumps(found["variants"][name]), file=sys.stderr, flush=True)
    return found


def variants(llm: LLM, args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, LLM, float | None]]:
    """(name, what runs, tokens that a round would emit at the article's acceptance, where drafts are drafted)."""
    yield "plain", llm, None
    vocab, length, scripts = llm.model_config.vocab_size, args.output_tokens, folder / "script.json"

    def scripted(script: list[int], width: int) -> LLM:
        write_script(scripts, script)
        return llm.with_drafter("scripted", str(scripts), width)

    for rows in args.rows:
        yield f"verify {rows} rows", scripted(random_ids(vocab, length), rows - 1), None
    text = llm.generate(prompt_of(llm, args, 0), sampling(args)).token_ids
    for width, accepted in (NEXTN, DSPARK):
        script = pinned_script(text, width, accepted, vocab)
        yield f"{width + 1} rows, {accepted} emitted (synthetic, drafts cost nothing)", scripted(script, width), None
    yield "NEXTN", llm.with_drafter("mtp", draft_width=NEXTN[0]), NEXTN[1]
    path = None if args.model == "nano" else str(random_drafter(folder / "dspark", llm))
    yield "DSpark", llm.with_drafter("dspark", path, DSPARK[0]), DSPARK[1]


def measured(llm: LLM, args: argparse.Namespace, emitted: float | None) -> dict[str, Any]:
    """Of some requests after one that is not counted: milliseconds a token by the clock, and a round by the device's."""
    requests = []
    pinned = llm.plan.drafter == "scripted"
    for number in range(args.requests + 1):
        prompt = prompt_of(llm, args, 0 if pinned else number)  # a script is written for one prompt
        times = [e for e in llm.stream(prompt, sampling(args)) if e.output is not None or e.token_ids]
        output = times[-1].output
        assert output is not None
        rounds_ms = [event.round_ms for event in times[1:] if event.round_ms is not None]
        requests.append((output.timings.ttft_ms, output.timings.tpot_ms, output.timings.acceptance_length, rounds_ms))
    ttft, tpot, accepted, each = zip(*requests[1:], strict=True)
    flat = sorted(ms for rounds_ms in each for ms in rounds_ms)
    found = {
        "requests": args.requests, "ttft_ms": statistics.median(ttft), "tpot_ms": statistics.fmean(tpot),
        "tpot_ms_of_requests": list(tpot), "tokens_a_round": statistics.fmean(accepted), "round_ms": statistics.fmean(flat),
        "round_ms_percentiles": {share: flat[len(flat) * share // 100] for share in (50, 90, 99)},
    }  # fmt: skip
    if emitted is not None:
        found |= {"synthetic_tokens_a_round": emitted, "synthetic_tpot_ms": found["round_ms"] / emitted}
    return found


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=args.output_tokens, ignore_eos=True)


def prompt_of(llm: LLM, args: argparse.Namespace, number: int) -> list[int]:
    return random_ids(llm.model_config.vocab_size, args.context + number)[number:]


def random_drafter(folder: Path, llm: LLM) -> Path:
    """A DSpark drafter of the published sizes, five layers and a block of eight, with random weights in bf16."""
    from safetensors.torch import save_file

    from soloist.drafters.dspark_formats import destinations, read_draft_config
    from soloist.drafters.dspark_model import DsparkModel
    from soloist.weights.loader import model_shapes

    c = llm.model_config
    taps = [round(c.num_layers * share) for share in (0.02, 0.26, 0.55, 0.69, 0.83)]
    config = {
        "architectures": ["LingDSparkModel"], "model_type": "qwen3", "hidden_size": c.hidden_size, "vocab_size": c.vocab_size,
        "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
        "intermediate_size": 6144, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 6000000, "rope_scaling": None,
        "max_position_embeddings": 262144, "attention_bias": False, "num_target_layers": c.num_layers,
        "dflash_config": {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True, "block_size": 8,
                          "confidence_head_with_markov": True, "target_layer_ids": taps, "mask_token_id": 0,
                          "projector_type": "dspark", "attention_mode": "gqa"},
    }  # fmt: skip
    read = read_draft_config(config, ["fc.weight"] + ["markov_head.markov_w1.weight"])
    shapes = model_shapes(DsparkModel(read, torch.bfloat16, torch.device("meta")))
    tensors = {}
    for name, target in destinations(read, ()).items():
        values = torch.empty(shapes[target], dtype=torch.bfloat16)
        tensors[name] = values.fill_(1) if "norm" in name else values.normal_(0, shapes[target][-1] ** -0.5)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


# ---- sections in processes ---------------------------------------------------------------------------------------------


def command(args: argparse.Namespace, section: str, output: Path) -> list[str]:
    """Of a process that runs one section and writes what it found."""
    kept = {"ranks": args.ranks, "device": args.device, "model": args.model, "context": args.context, "requests": args.requests,
            "output-tokens": args.output_tokens, "prefill-chunk": args.prefill_chunk}  # fmt: skip
    flags = [part for name, value in kept.items() for part in (f"--{name}", str(value))]
    rows = ["--rows", *map(str, args.rows)]
    return [sys.executable, str(Path(__file__).resolve()), "--section", section, "--output", str(output), *flags, *rows]


def run(args: argparse.Namespace, section: str, folder: Path) -> dict[str, Any]:
    begun, output = time.perf_counter(), folder / f"{section}.json"
    process = subprocess.Popen(command(args, section, output), start_new_session=True)
    try:
        code = process.wait(args.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # ranks that an LLM started see it go and end
        process.wait()
        return {"error": f"took more than {args.limit_s} s"}
    found = json.loads(output.read_text()) if code == 0 else {"error": f"ended with code {code}"}
    return {**found, "seconds": time.perf_counter() - begun}


def communication(sections: dict[str, Any]) -> dict[str, float]:
    """Milliseconds that a round takes longer with the others than alone, variant by variant."""
    with_others, lone = (sections.get(name, {}).get("variants", {}) for name in ("flash", "alone"))
    return {name: with_others[name]["round_ms"] - lone[name]["round_ms"] for name in with_others if name in lone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=[], metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="shapes:ling-3.0-flash", help="of the sections alone and flash")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=3, help="of every variant")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="windows to verify")
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--limit-s", type=float, default=280.0, help="most seconds of a section")
    parser.add_argument("--output", type=Path, default=Path("parallel.json"))
    parser.add_argument("--section", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.section:
        section = {"rank-of-sums": rank_of_sums, "sums": sums, "texts": texts, "alone": alone, "flash": flash}[args.section]
        found = section(args)
        if args.section != "rank-of-sums" or os.environ["RANK"] == "0":
            args.output.write_text(json.dumps(found))
        return
    record: dict[str, Any] = {"machine": dataclasses.asdict(read_machine(torch.get_num_threads())), "ranks": args.ranks,
                              "command": sys.argv[1:], "sections": {}}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in args.sections or SECTIONS:
            record["sections"][name] = run(args, name, Path(folder))
            record["communication_ms"] = communication(record["sections"])
            args.output.write_text(json.dumps(record, indent=1) + "\n")
            print(name, json.dumps(record["sections"][name]), flush=True)


if __name__ == "__main__":
    main()
