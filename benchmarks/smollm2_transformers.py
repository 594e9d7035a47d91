"""SmolLM2 on the CPU: decoding beside transformers on the same fp32 weights and threads, interleaved in one run.

    python benchmarks/smollm2_transformers.py --threads 1 --output benchmarks/runs/smollm2-transformers-cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import soloist
from soloist import LLM, SamplingParams
from soloist.runtime.assemble import device_name
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

PROMPT = "The quick brown fox jumps over the lazy dog. "


def reference(path: Path) -> Any:
    """transformers' Llama with the weights that soloist dequantised."""
    checkpoint = open_checkpoint(path)
    model_config = transformers.LlamaConfig.from_dict(checkpoint.config)
    model = transformers.LlamaForCausalLM(model_config).float().eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


@torch.inference_mode()
def decode_reference(model: Any, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Greedy ids, and milliseconds a token after the first."""
    cache = transformers.DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1).logits
    ids = [int(logits[0, -1].argmax())]
    begun = time.perf_counter()
    while len(ids) < count:
        logits = model(torch.tensor([[ids[-1]]]), past_key_values=cache).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids, (time.perf_counter() - begun) * 1e3 / (count - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    llm = LLM("smollm2", threads=args.threads, prefix_cache_bytes=0)
    model = reference(resolve_model_path("smollm2"))
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    results = []
    for length in (32, 512):
        prompt = (llm.encode(PROMPT) * 100)[:length]
        ours, theirs, same = [], [], True
        for repeat in range(args.repeats + 1):
            output = llm.generate(prompt, params)
            ids, ms = decode_reference(model, prompt, args.tokens)
            same &= ids == output.token_ids
            if repeat:  # the first warms both up
                ours.append(output.timings.tpot_ms)
                theirs.append(ms)
        assert same, f"transformers gave other ids after {length} prompt tokens"
        ratio = statistics.median(theirs) / statistics.median(ours)
        results.append({"prompt_tokens": length, "soloist_tpot_ms": ours, "transformers_tpot_ms": theirs,
                        "speed_ratio_of_medians": ratio})  # fmt: skip
        print(f"{length} tokens: {statistics.median(ours):.1f} ms against {statistics.median(theirs):.1f}, x{ratio:.3f}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    card = {"date": str(date.today()), "commit": commit, "cpu": device_name(torch.device("cpu")), "threads": args.threads,
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
            "soloist": soloist.__version__, "dtype": "float32", "tokens": args.tokens, "results": results}  # fmt: skip
    args.output.write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    main()
