"""What streams is what is answered is what LLM.generate says, whoever drafts and however wide; asked by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from soloist import LLM, SamplingParams
from soloist.llm import Output

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
from tests.llms import nano
from tests.serving import Address, serving

MESSAGES = [{"role": "user", "content": "What is a cache?"}]
PROMPT = "PostgreSQL indexes can be"
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}, "count": {"type": "integer", "maximum": 99}},
          "required": ["kind", "count"], "additionalProperties": False}  # fmt: skip
NAMES = ("greedy", "sampled", "schema", "penalised", "stopped", "stopped-by-id")
FEW: list[tuple[str, int | str]] = [
    ("none", "auto"), ("ngram", 4), ("mtp", 3), ("dspark", "auto"), ("scripted", 5), ("scripted-half", 3),
]  # fmt: skip
MORE = [*(("ngram", width) for width in (1, 2, 7, 15, "auto")), *(("mtp", width) for width in (1, 2, 5, 8, "auto")),
        *(("dspark", width) for width in (1, 3, 5)), *(("scripted", width) for width in (1, 2, 8, 15))]  # fmt: skip


def cases() -> Iterator[Any]:
    """Every drafter meets every second kind of request, and at all widths, and slowly, all."""
    for i, (drafter, width) in enumerate([*FEW, *MORE]):
        for j, name in enumerate(NAMES):
            quick = i < len(FEW) and (i + j + j // 3) % 2 == 0
            marks = () if quick else pytest.mark.slow
            yield pytest.param(drafter, width, name, marks=marks, id=f"{drafter}-{width}-{name}")


@cache
def greedy(prompt: str | None) -> Output:
    """nano's own answer to MESSAGES, or how it goes on behind a text."""
    return nano().generate(prompt or MESSAGES, SamplingParams(temperature=0, max_tokens=24))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes the same model with another drafter. The scripts know the greedy chat, wholly or every other token of it."""
    folder: Path = tmp_path_factory.mktemp("scripts")
    known = greedy(None).token_ids
    for name, shift in (("scripted", 0), ("scripted-half", 1)):
        script = [token + shift * (i % 2) for i, token in enumerate(known)]
        (folder / name).write_text(json.dumps({"script": script}))

    def make(name: str, width: int | str) -> LLM:
        if "scripted" in name:
            return nano().with_drafter("scripted", str(folder / name), width)
        return nano(name, width)

    yield make


@pytest.fixture(scope="module")
def served(drafting: Any) -> Iterator[Callable[[str, int | str], Address]]:
    """A server for each drafter and width that is asked for."""
    with ExitStack() as stack:
        yield cache(lambda name, width: stack.enter_context(serving(drafting(name, width), "nano")))


@cache
def asked() -> dict[str, tuple[str, dict[str, Any]]]:
    """The endpoint and the fields, apart from the prompt, of requests of every kind."""
    text, ids = greedy(PROMPT).text, greedy(PROMPT).token_ids
    return {
        "greedy": ("chat", {"temperature": 0, "max_tokens": 12}),
        "sampled": ("chat", {"temperature": 1.0, "seed": 7, "max_tokens": 12, "top_p": 0.95, "top_k": 60, "min_p": 0.01}),
        "schema": ("chat", {"temperature": 0.7, "seed": 2, "max_tokens": 30, "response_format":
                            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}),
        "penalised": ("text", {"temperature": 0, "max_tokens": 10, "presence_penalty": 1.2, "frequency_penalty": 0.4,
                               "repetition_penalty": 1.1, "logit_bias": {str(ids[0]): -3}}),
        "stopped": ("text", {"temperature": 0, "max_tokens": 16, "stop": ["never said", text[21:24]]}),
        "stopped-by-id": ("text", {"temperature": 0, "max_tokens": 16, "stop_token_ids": [ids[9]], "min_tokens": 2}),
    }  # fmt: skip


@dataclass
class Said:
    """An answer, in whatever form it came. logprobs: of each token its own, then those of the alternatives."""

    text: str
    ids: list[int]
    finish: str
    stop: str | int | None
    logprobs: list[list[float]]
    counts: tuple[int, int, int]


@cache
def generated(name: str) -> Said:
    kind, fields = asked()[name]
    params = {**fields, "logprobs": 2, "logit_bias": {int(k): v for k, v in fields.get("logit_bias", {}).items()} or None}
    out = nano().generate(MESSAGES if kind == "chat" else PROMPT, SamplingParams(**params))
    logprobs = [[one.logprob, *sorted(one.top.values())] for one in out.logprobs or ()]
    usage = out.usage
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    return Said(out.text, out.token_ids, out.finish_reason, out.stop_reason, logprobs, counts)


def body(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    own = {"min_p", "top_k", "repetition_penalty", "min_tokens", "stop_token_ids"}  # OpenAI's client has no names for these
    extra = {"return_token_ids": True, **{name: value for name, value in fields.items() if name in own}}
    prompt = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2} if kind == "chat" else {"prompt": PROMPT, "logprobs": 2}
    return {"model": "nano", **prompt, **{k: v for k, v in fields.items() if k not in own}, "extra_body": extra}


def logprobs(given: Any) -> list[list[float]]:
    if hasattr(given, "content"):
        return [[one.logprob, *sorted(top.logprob for top in one.top_logprobs)] for one in given.content]
    return [[own, *sorted(top.values())] for own, top in zip(given.token_logprobs, given.top_logprobs, strict=True)]


def endpoint(address: Address, kind: str) -> Any:
    client = address.client()
    return client.chat.completions if kind == "chat" else client.completions


def answered(address: Address, kind: str, fields: dict[str, Any]) -> Said:
    whole = endpoint(address, kind).create(**body(kind, fields))
    choice, usage = whole.choices[0], whole.usage
    text = choice.message.content if kind == "chat" else choice.text
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    return Said(text, choice.token_ids, choice.finish_reason, choice.stop_reason, logprobs(choice.logprobs), counts)


def streamed(address: Address, kind: str, fields: dict[str, Any]) -> tuple[Said, list[Any]]:
    asked = {**body(kind, fields), "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(endpoint(address, kind).create(**asked))
    *parts, last = chunks
    assert last.choices == [] and all(part.usage is None for part in parts)
    rounds = [part.choices[0] for part in parts]
    text = "".join(one.delta.content or "" if kind == "chat" else one.text for one in rounds)
    counts = (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)
    assert [one.finish_reason for one in rounds[:-1]] == [None] * (len(rounds) - 1)
    ids = [token for one in rounds for token in one.token_ids]
    found = [row for one in rounds for row in (logprobs(one.logprobs) if one.logprobs else [])]
    return Said(text, ids, rounds[-1].finish_reason, rounds[-1].stop_reason, found, counts), rounds


@pytest.mark.parametrize(("drafter", "width", "name"), list(cases()))
def test_a_stream_and_an_answer_are_what_generate_says(served: Any, drafter: str, width: int | str, name: str) -> None:
    kind, fields = asked()[name]
    server = served(drafter, width)
    assert answered(server, kind, fields) == generated(name)
    found, rounds = streamed(server, kind, fields)
    assert found == generated(name)
    assert all(one.token_ids for one in rounds), "a chunk without tokens"


def test_every_round_is_a_chunk_with_all_its_tokens(served: Any) -> None:
    """The script is right, so 1 token from the prefill, then 6 in each round."""
    _, rounds = streamed(served("scripted", 5), *asked()["greedy"])
    assert [len(one.token_ids) for one in rounds] == [1, 6, 5]


def test_negative_control_other_fields_change_the_answer() -> None:
    said = {name: generated(name).text for name in asked()}
    assert len(set(said.values())) == len(said)
    assert said["stopped"] == greedy(PROMPT).text[:21]


# ---- what one server says ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(served: Any) -> Address:
    return served("mtp", 3)


def test_token_id_prompts_and_several_choices(server: Address) -> None:
    client = server.client()
    prompts = [[5, 17, 88], [9, 9]]
    several = client.completions.create(model="nano", prompt=prompts, n=2, seed=3, max_tokens=6)
    alone = [client.completions.create(model="nano", prompt=p, seed=s, max_tokens=6) for p in prompts for s in (3, 4)]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in several.choices]
    assert texts == [one.choices[0].text for one in alone] and len(set(texts)) > 1
    assert several.usage.prompt_tokens == 5 and several.usage.completion_tokens == 24
    chunks = client.completions.create(model="nano", prompt=prompts, n=2, seed=3, max_tokens=6, stream=True)
    parts = [chunk.choices[0] for chunk in chunks]
    assert ["".join(part.text for part in parts if part.index == i) for i in range(4)] == texts


def test_an_echo_stands_before_the_answer(server: Address) -> None:
    asked = {"model": "nano", "prompt": PROMPT, "temperature": 0, "max_tokens": 6}
    plain = server.client().completions.create(**asked).choices[0].text
    assert server.client().completions.create(**asked, echo=True).choices[0].text == PROMPT + plain
    parts = server.client().completions.create(**asked, echo=True, stream=True)
    assert "".join(part.choices[0].text for part in parts) == PROMPT + plain


def test_offsets_of_tokens_lead_into_the_text(server: Address) -> None:
    choice = server.client().completions.create(model="nano", prompt=PROMPT, temperature=0, max_tokens=20, logprobs=0).choices[0]
    found = choice.logprobs
    starts = [*found.text_offset[1:], len(choice.text)]
    cut = [choice.text[a:b] for a, b in zip(found.text_offset, starts, strict=True)]
    assert cut == found.tokens and "".join(cut) == choice.text


def test_usage_grows_in_every_chunk_where_that_is_asked_for(server: Address) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.client().completions.create(
        model="nano", prompt=PROMPT, temperature=0, max_tokens=12, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-2:] == [12, 12]


def test_the_bytes_of_a_stream_are_events_that_end_with_done(server: Address) -> None:
    _, headers, data = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    *events, last = data.decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]" and events
    said = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {one["object"] for one in said} == {"text_completion"} and len({one["id"] for one in said}) == 1


def test_reasoning_comes_apart_and_is_never_more_than_the_answer(server: Address) -> None:
    """Also where max_tokens cuts it off: thinking stays out of the content. nano stops thinking at once if it is let."""
    [end] = server.post("/tokenize", {"prompt": "</think>", "add_special_tokens": False})[1]["tokens"]
    asked = {"model": "nano", "messages": MESSAGES, "temperature": 0.6, "seed": 1, "max_tokens": 12}
    asked["logit_bias"] = {str(end): -100}
    for thinking in (True, False):
        fields = {**asked, "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}}}
        whole = server.client().chat.completions.create(**fields)
        message, usage = whole.choices[0].message, whole.usage
        parts = [chunk.choices[0].delta for chunk in server.client().chat.completions.create(**fields, stream=True)]
        reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
        assert reasoning == (getattr(message, "reasoning_content", None) or "")
        assert "".join(part.content or "" for part in parts) == (message.content or "")
        assert bool(reasoning) == thinking and (not thinking or not message.content)
        counted = usage.completion_tokens_details.reasoning_tokens
        assert counted == (usage.completion_tokens if thinking else 0) <= 12


def test_timings_tell_rounds_and_drafts_and_running_counts(server: Address) -> None:
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "timings": True}
    times = server.post("/v1/completions", asked)[1]["timings"]
    assert times["rounds"] > 0 and times["drafted"] >= times["rounds"] and times["ttft_ms"] > 0
    assert sum(k * count for k, count in enumerate(times["accepted_histogram"])) == 19
    data = server.ask("/v1/completions", {**asked, "stream": True, "timings_per_token": True})[2].decode()
    running = [json.loads(event.removeprefix("data: "))["timings"] for event in data.split("\n\n")[:-2]]
    assert [one["predicted_n"] for one in running] == sorted(one["predicted_n"] for one in running)
    assert running[-1]["predicted_n"] == 20 and 0 < running[-1]["draft_n_accepted"] <= running[-1]["draft_n"]
    assert "timings" not in server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[1]


def test_tokens_and_text_translate_back(server: Address) -> None:
    text = "Fluss über Straße 🙂"
    ids = server.post("/tokenize", {"prompt": text})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1]["prompt"] == text
    rendered = server.post("/tokenize", {"messages": MESSAGES})[1]
    assert rendered["tokens"] == nano().encode(MESSAGES) and rendered["count"] == len(rendered["tokens"])


def test_the_models_card_names_its_context(server: Address) -> None:
    [card] = server.client().models.list().data
    assert card.id == "nano" and card.max_model_len == 1024
    assert server.client().models.retrieve("nano") == card
    with pytest.raises(Exception, match="no model 'other'"):
        server.client().models.retrieve("other")
