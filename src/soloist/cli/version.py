"""Show the versions of soloist, Python, torch and triton, and the CUDA that torch was built for."""

from __future__ import annotations

import argparse
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import soloist
from soloist.cli.flags import add_json_flag


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    found = versions()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:9}{'none' if value is None else value}")
    return 0


def versions() -> dict[str, str | None]:
    """Name -> version, None for what is not installed. Read from the packages' files: importing torch takes seconds."""
    return {
        "soloist": soloist.__version__,
        "python": platform.python_version(),
        "torch": installed("torch"),
        "triton": installed("triton"),
        "cuda": torch_cuda(),
        "system": platform.platform(),
    }


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, None for a build without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=]*= *['\"](.+)['\"]", file.read_text(), re.M) if file.exists() else None
    return found[1] if found else None
