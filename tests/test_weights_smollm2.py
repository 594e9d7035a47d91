"""SmolLM2-135M-Instruct, real weights: the prompts and ids that transformers 5.24 and llama.cpp agree on in fp32."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from soloist.errors import UserError
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

pytest.importorskip("gguf")
pytestmark = pytest.mark.weights

MOST_BYTES = 1_200_000_000
"""Of resident memory for the whole process in fp32, with the model's whole context."""

PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "def fibonacci(n):": [1604, 3987, 46477, 24, 94, 727],
    "Why is the sky blue?": [4898, 314, 260, 6376, 4461, 47],
}
BEFORE = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
          198, 1, 4093, 198]  # fmt: skip
AFTER = [2, 198, 1, 520, 9531, 198]

RAW = {
    "The capital of France is": [
        7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34,
        42, 37, 35, 30, 2],
    "def fibonacci(n):": [
        472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472, 1003, 304, 1672, 3987, 46477, 24, 94, 731, 216, 33,
        25, 198, 198, 19, 4246, 260, 1517, 198, 3272, 24],
    "Why is the sky blue?": [2],
}  # fmt: skip
CHAT = {
    "The capital of France is": [
        60, 23, 603, 24583, 83, 2756, 17, 339, 744, 469, 7952, 5646, 28, 284, 339, 744, 1535, 288, 724, 346, 351, 469,
        12517, 30, 339, 744, 253, 5356, 5646, 2724, 288, 4237],
    "def fibonacci(n):": [
        504, 24681, 46477, 5972, 314, 253, 8170, 1183, 282, 253, 35881, 5972, 837, 971, 2115, 314, 260, 2028, 282, 260,
        827, 18393, 2656, 30, 1626, 7529, 260, 24681, 46477, 5972, 28, 346],
    "Why is the sky blue?": [
        504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380, 30, 378, 6376, 4541, 4461, 975,
        282, 253, 7613, 1343, 347, 13739, 43464, 24484, 30, 669, 4149, 645],
}  # fmt: skip


@cache
def model_path() -> Path:
    try:
        return resolve_model_path("smollm2")
    except UserError as missing:
        pytest.skip(str(missing))


@cache
def model():  # type: ignore[no-untyped-def]
    from soloist import LLM

    model_path()
    return LLM("smollm2", dtype="float32", context_length=512)


def test_opening_takes_two_seconds_at_most_and_ends_are_known() -> None:
    model_path()
    begun = time.perf_counter()
    checkpoint = open_checkpoint(model_path())
    assert time.perf_counter() - begun < 2.0
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.config["tie_word_embeddings"] is True and checkpoint.config["rms_norm_eps"] == 1e-5
    assert sum(info.numel for info in checkpoint.tensors.values()) == 134_515_008


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_have_the_reference_ids(prompt: str) -> None:
    assert model().encode(prompt) == PROMPTS[prompt]
    chat = model().encode([{"role": "user", "content": prompt}])
    assert chat == BEFORE + PROMPTS[prompt] + AFTER


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("as_chat", [False, True], ids=["raw", "chat"])
def test_greedy_ids_are_those_of_transformers(prompt: str, as_chat: bool) -> None:
    from soloist import SamplingParams

    asked = [{"role": "user", "content": prompt}] if as_chat else prompt
    output = model().generate(asked, SamplingParams(temperature=0, max_tokens=32))
    expected = (CHAT if as_chat else RAW)[prompt]
    assert output.token_ids == expected
    assert output.finish_reason == ("stop" if expected[-1] == 2 else "length")


def test_first_logits_are_those_of_transformers() -> None:
    """Raw France, the five best, as published with the ids; a wrong head permutation moves them by whole units."""
    values, ids = model().logits(PROMPTS["The capital of France is"])[-1].topk(5)
    assert ids.tolist() == [7042, 260, 4528, 2250, 1315]
    assert values.tolist() == pytest.approx([17.371, 14.889, 13.245, 13.010, 12.952], abs=1.5e-3)


def test_the_whole_process_stays_below_1_2_gigabytes() -> None:
    model_path()
    code = (
        "from soloist import LLM, SamplingParams; llm = LLM('smollm2', dtype='float32');"
        "llm.generate([504, 3575], SamplingParams(temperature=0, max_tokens=4));"
        # ru_maxrss would count the parent that this process was forked from.
        "print(next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 538_000_000 < int(done.stdout) < MOST_BYTES
