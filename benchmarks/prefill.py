"""Prefill on a GPU: from a prompt of random ids to its first token, and where the time goes, kernel by kernel.

    python benchmarks/prefill.py --tokens 8192 --chunk 8192 --top 40
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from soloist import LLM, SamplingParams


def first_token_ms(llm: LLM, prompt: list[int]) -> float:
    """From the call until the first token is on the host."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shapes:ling-3.0-tiny")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--top", type=int, default=40, help="kernels shown")
    args = parser.parse_args()
    llm = LLM(args.model, device="cuda", context_length=args.tokens + 256, prefill_chunk=args.chunk, prefix_cache_bytes=0)
    prompt = torch.randint(1000, 30000, (args.tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    first, second = first_token_ms(llm, prompt), first_token_ms(llm, prompt)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    samples = [first_token_ms(llm, prompt) for _ in range(args.repeats)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        first_token_ms(llm, prompt)
    events = traced.key_averages()
    print(events.table(sort_by="self_cuda_time_total", row_limit=args.top, max_name_column_width=80))
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    syncs = {e.key: e.count for e in events if "Synchronize" in e.key or e.key.startswith("cudaMemcpy")}
    print(json.dumps({
        "model": args.model, "tokens": args.tokens, "chunk": args.chunk, "device": torch.cuda.get_device_name(),
        "first_ms": first, "second_ms": second, "median_ms": statistics.median(samples), "samples_ms": samples,
        "kernel_ms": sum(e.self_device_time_total for e in kernels) / 1e3, "kernels": sum(e.count for e in kernels),
        "syncs_and_copies": syncs, "activations_mb": (torch.cuda.max_memory_allocated() - held) / 1e6,
    }, indent=1))  # fmt: skip
    llm.close()


if __name__ == "__main__":
    main()
