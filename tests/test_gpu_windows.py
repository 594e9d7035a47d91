"""Law 2 on a GPU: a window of T rows leaves the bits that T windows of one row leave, through whole models."""

from __future__ import annotations

import pytest
import torch

from soloist import LLM, SamplingParams

pytestmark = pytest.mark.gpu
WIDTHS = (1, 2, 3, 4, 7, 8, 9, 15)
TEXT = "The river was wide and the boat was small. def main():\n    return 1\n" * 4
DRAFTERS = [("ngram", 1), ("ngram", 4), ("ngram", 12), ("mtp", 3), ("dspark", 7), ("dspark", "auto")]


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("nano", device="cuda", dtype=request.param, context_length=1024)


def logits_of_windows(llm: LLM, ids: torch.Tensor, width: int) -> torch.Tensor:
    """Logits of all ids, fed in windows of so many rows that are all kept."""
    parts, found = llm._engine.parts, []
    with torch.inference_mode():
        parts.sequence.reset(len(ids))
        for start in range(0, len(ids), width):
            part = ids[start : start + width]
            window = parts.sequence.window(len(part), start + len(part))
            out = parts.model(part, window, parts.sequence.caches)
            found.append(parts.model.logits(out.hidden))
            parts.sequence.commit(torch.tensor([len(part)], device=ids.device))
    return torch.cat(found)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_window_has_the_bits_of_its_rows(llm: LLM, width: int) -> None:
    ids = torch.tensor(llm.encode(TEXT), device="cuda")
    assert torch.equal(logits_of_windows(llm, ids, width), logits_of_windows(llm, ids, 1))


@pytest.mark.parametrize(("drafter", "width"), DRAFTERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_text_does_not_depend_on_the_drafter(drafter: str, width: int | str, dtype: str) -> None:
    prompts = ["The river was", "def fibonacci(n):\n", "How do I open a file in Python?"]
    asked = [SamplingParams(temperature=t, seed=3, max_tokens=120, ignore_eos=True) for t in (0.0, 0.8)]

    def texts(**settings: object) -> list[list[int]]:
        llm = LLM("nano", device="cuda", dtype=dtype, **settings)
        try:
            return [llm.generate(prompt, params).token_ids for prompt in prompts for params in asked]
        finally:
            llm.close()

    assert texts(drafter=drafter, draft_width=width) == texts()
