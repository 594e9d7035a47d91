"""The shape of the code base: imports point downwards, files stay small, help and imports stay quick."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "soloist"

LEVELS = {
    "errors": 0, "config": 0,
    "ops": 1, "text": 1,
    "state": 2, "dist": 2,
    "layers": 3,
    "weights": 4,
    "models": 5,
    "drafters": 6, "persistent": 6,
    "runtime": 7,
    "llm": 8, "follower": 8,
    "server": 9, "cli": 9, "bench": 9, "testing": 9, "train": 9, "__main__": 9, "__init__": 9,
}  # fmt: skip
CORE = [name for name in LEVELS if name not in ("testing", "train", "bench", "persistent", "server")]


def unit(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Top-level parts of soloist that a file imports, also inside functions, apart from type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("soloist"):
            found.add((node.module.split(".") + [""])[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("soloist.")}
    return found - {""}


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    own = LEVELS[unit(path)]
    above = {name for name in imported(path) if LEVELS[name] > own}
    assert not above, f"{unit(path)} imports {above}"


def code_lines(path: Path) -> int:
    """Lines with code: without blank lines, comments and docstrings."""
    text = path.read_text()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in docs)


def test_files_and_core_stay_small() -> None:
    too_long = {str(p.relative_to(SOURCE)): n for p in FILES if (n := len(p.read_text().splitlines())) > 450}
    assert not too_long
    core = sum(code_lines(p) for p in FILES if unit(p) in CORE and "gpu" not in p.parts)  # kernels stand beside it
    assert core <= 10000, core


def test_size_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, int] = {}
    for path in FILES:
        sizes[unit(path)] = sizes.get(unit(path), 0) + code_lines(path)
    with capsys.disabled():
        print("\ncode lines: " + ", ".join(f"{name} {n}" for name, n in sorted(sizes.items(), key=lambda x: -x[1])))
    assert sizes["ops"] > 0


@pytest.mark.parametrize("module", ["soloist", "soloist.config", "soloist.errors"])
def test_light_imports_do_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    begun = cpu_seconds_of_children()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert cpu_seconds_of_children() - begun < 1.0


def cpu_seconds_of_children() -> float:
    """Not the clock's: a busy machine takes nothing from them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_engine_is_imported_without_torchs_compiler() -> None:
    """It takes as long to import as all else together, and nothing needs it before a model is loaded."""
    code = "import sys, soloist.llm; assert not {'torch._dynamo', 'sympy', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_text_layer_does_not_import_torch() -> None:
    for path in (SOURCE / "text").rglob("*.py"):
        assert "import torch" not in path.read_text(), path
