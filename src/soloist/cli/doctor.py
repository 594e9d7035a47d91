"""Say why this machine will be slow, and what to do about it: processor, memory, GPU, packages, other programs.

With --model it also compares the model's size with the memory, and says what no token can be faster than.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from soloist.cli.checks.finding import Finding, ok
from soloist.cli.flags import add_json_flag
from soloist.config import EngineConfig, environment_threads, kernel_cache_folder

MARKS = {"slow": "SLOW", "note": "note", "ok": "ok"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--model", metavar="NAME", help="a model to judge the machine by")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    findings = examine(args.model)
    slow = sum(finding.verdict == "slow" for finding in findings)
    if args.json:
        print(json.dumps({"slow": slow, "findings": [dataclasses.asdict(finding) for finding in findings]}))
        return 0
    for verdict in MARKS:
        for finding in findings:
            if finding.verdict == verdict:
                print(f"{MARKS[verdict]:5} {finding.topic:17} {finding.found}")
                if finding.remedy:
                    print(f"{'':23} -> {finding.remedy}")
    things = "nothing" if not slow else "1 thing" if slow == 1 else f"{slow} things"
    print(f"\n{things} found that cost{'s' if slow < 2 else ''} speed here")
    return 0


def examine(model: str | None, root: Path = Path("/")) -> list[Finding]:
    """All checks, in the order of the report.   Raises: UserError for a model that cannot be opened."""
    from soloist.cli.checks import gpu, host, install

    judged = None if model is None else _judge(model)
    rows, build = gpu.query_gpus(), install.read_torch()
    findings = [
        *host.check_load(root),
        *host.check_threads(host.read_cpus(root), _threads(), environment_threads()),
        *host.check_clock(root),
        *host.check_instructions(root),
        *host.check_memory(root, None if judged is None else judged.needed_bytes),
        *([] if rows is None else gpu.check_gpus(*rows)),
        *install.check_torch(build, rows is not None and bool(rows[0].strip())),
        *install.check_packages(),
    ]
    if build.sees_gpu:
        import torch

        findings += gpu.check_peers(torch.cuda.device_count(), torch.cuda.can_device_access_peer)
        findings += install.check_kernel_cache(kernel_cache_folder())
    return [*findings, *_rates(judged, ["cpu", "cuda"] if build.sees_gpu else ["cpu"])]


@dataclasses.dataclass(frozen=True)
class Judged:
    """What a model asks of the machine: the kind of device, memory, and bytes of weights read for a token."""

    device_type: str
    needed_bytes: int
    token_bytes: int


def _threads() -> int:
    import torch

    return environment_threads() or torch.get_num_threads()


def _judge(model: str) -> Judged:
    from soloist.cli.explain import resolved
    from soloist.runtime.assemble import DTYPES
    from soloist.runtime.traffic import token_traffic

    plan, shape = resolved(EngineConfig(model=model))
    weights = token_traffic(shape, DTYPES[plan.dtype], 0).weight_bytes
    return Judged(plan.device.split(":")[0], plan.parameter_bytes + plan.state_bytes, weights)


def _rates(judged: Judged | None, kinds: list[str]) -> list[Finding]:
    """Measured memory read rates, and what they mean."""
    import torch

    from soloist.runtime.traffic import read_rate

    found = []
    for kind in kinds:
        rate = read_rate(torch.device(kind))
        meaning = f"1 GB of weights takes {1e12 / rate:.3g} ms a token"
        if judged is not None and judged.device_type == kind:
            meaning = f"this model's weights take {judged.token_bytes / rate * 1e3:.3g} ms a token"
        found.append(ok(f"{'GPU' if kind == 'cuda' else 'CPU'} memory rate", f"{rate / 1e9:.3g} GB/s read; {meaning}"))
    return found
