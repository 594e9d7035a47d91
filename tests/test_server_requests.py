"""What a server refuses, and how: by name, in OpenAI's shape, and with nothing left behind."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from soloist import LLM
from soloist.testing.checkpoints import write_checkpoint

pytest.importorskip("msgspec")
pytest.importorskip("uvicorn")
from tests.llms import fresh, nano
from tests.serving import Address, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    with serving(nano(), "nano") as address:
        yield address


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, **more}


def text(**more: Any) -> dict[str, Any]:
    return {"prompt": "a", **more}


SCHEMA_FALSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": False}}
REFUSED = [
    (TEXT, text(foo=1), 400, "foo"),
    (TEXT, text(suffix="b"), 400, "suffix"),
    (TEXT, text(stream=True, stream_options={"bar": True}), 400, "stream_options.bar"),
    (TEXT, text(stream_options={"include_usage": True}), 400, "stream_options"),
    (TEXT, text(max_tokens=0), 400, "max_tokens"),
    (TEXT, text(min_tokens=9, max_tokens=3), 400, "min_tokens"),
    (TEXT, text(best_of=3), 400, "best_of"),
    (TEXT, text(n=0), 400, "n"),
    (TEXT, text(n=17), 400, "n"),
    (TEXT, text(temperature=-1), 400, "temperature"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, None),
    (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    (TEXT, text(top_p=1.1), 400, "top_p"),
    (TEXT, text(min_p=2), 400, "min_p"),
    (TEXT, text(logprobs=True), 400, "logprobs"),
    (TEXT, text(echo=True, logprobs=1), 400, "echo"),
    (TEXT, text(stop=["a", ""]), 400, "stop[1]"),
    (TEXT, text(logit_bias={"999999": 1}), 400, "logit_bias"),
    (TEXT, text(prompt=[999999]), 400, "prompt"),
    (TEXT, text(prompt=[-1]), 400, "prompt[0]"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=["a", 5]), 400, "prompt"),
    (TEXT, text(prompt="\ud800"), 400, None),
    (TEXT, text(model="other"), 404, "model"),
    (TEXT, text(response_format={"type": "xml"}), 400, "response_format"),
    (TEXT, text(response_format=SCHEMA_FALSE, stream=True), 400, "response_format"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, b'{"prompt"', 400, None),
    (TEXT, b"[" * 100_000, 400, None),
    (TEXT, b"\xff\xfe", 400, None),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages"),
    (CHAT, chat(messages=[{"content": "no role"}]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), 400, "messages"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), 400, "max_completion_tokens"),
    (CHAT, chat(chat_template_kwargs={"x": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs"),
    (CHAT, chat(store=True), 400, "store"),
    (CHAT, chat(modalities=["audio"]), 400, "modalities[0]"),
    (CHAT, chat(functions=[]), 400, "functions"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ("/v1/abort", {"id": "nobody"}, 404, "id"),
    ("/nowhere", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_what_is_refused_is_refused_by_name(server: Address, path: str, body: Any, status: int, param: str | None) -> None:
    got, answer = server.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"} and "\n" not in answer["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 1e-7}, {"temperature": 1e6}, {"top_p": 1e-6}, {"top_p": 1, "temperature": 0},
     {"top_k": -1}, {"top_k": 1}, {"top_k": 1 << 31}, {"min_p": 1}, {"temperature": 0, "top_p": 0.5, "top_k": 3}],
)  # fmt: skip
def test_negative_control_odd_values_that_mean_something_are_served(server: Address, fields: dict[str, Any]) -> None:
    status, answer = server.post(TEXT, text(**fields, max_tokens=2, logprobs=1))
    assert status == 200 and len(answer["choices"][0]["logprobs"]["tokens"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_one_token_below_the_context_gets_one_and_longer_ones_are_told_both_numbers(
    server: Address, stream: bool
) -> None:
    fits = server.ask(TEXT, text(prompt=[5] * 1023, max_tokens=9, stream=stream, ignore_eos=True, return_token_ids=True))
    assert fits[0] == 200 and fits[2].count(b'"finish_reason":"length"') == 1
    for length in (1024, 1025, 10240):
        status, answer = server.post(TEXT, text(prompt=[5] * length, stream=stream))
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert str(length) in answer["error"]["message"] and "1024" in answer["error"]["message"]


def test_the_clients_errors_are_of_the_class_of_the_status(server: Address) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model="nano", prompt=[999999])
    assert refused.value.param == "prompt" and "999999" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        server.client().completions.create(model="other", prompt="a")


def test_other_kinds_and_methods_and_bodies_too_large_are_refused() -> None:
    with serving(nano(), "nano", max_request_bytes=1000) as server:
        assert server.ask(TEXT, text(), content_type="text/plain")[0] == 415
        status, headers, _ = server.ask(TEXT, method="GET")
        assert (status, headers["allow"]) == (405, "POST")
        assert server.ask("/health", text())[0] == 405 and server.ask("/health", method="HEAD")[::2] == (200, b"")
        status, _, answer = server.ask(TEXT, text(prompt="a" * 1000))
        assert status == 413 and json.loads(answer)["error"]["code"] == "too_large"
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        parts = (b"x" * 400 for _ in range(3))  # of a length that is not told beforehand
        with suppress(BrokenPipeError):  # the answer may come before the end is sent
            connection.request("POST", TEXT, parts, {"content-type": "application/json"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        assert server.ask(TEXT, text(max_tokens=1))[0] == 200


def test_only_the_right_keys_open_and_what_tells_nothing_stays_open() -> None:
    with serving(nano(), "nano", api_key=("right", "other")) as server:
        for path in ("/v1/models", "/metrics", TEXT, "/v1/abort", "/tokenize"):
            for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer righ"}):
                status, headers, _ = server.ask(path, None if path[-1] == "s" and path != TEXT else text(), **given)
                assert status == 401 and headers["www-authenticate"] == "Bearer", path
        assert server.client("right").models.list().data[0].id == server.client("other").models.list().data[0].id
        for path in ("/", "/health", "/ready", "/openapi.json"):
            assert server.ask(path)[0] == 200


def test_pages_of_other_origins_are_let_in_where_that_was_set_and_nowhere_else(server: Address) -> None:
    asked = {"origin": PAGE, "access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    with serving(nano(), "nano", cors_origin=(PAGE,), api_key=("k",)) as open_to_one:
        status, headers, _ = open_to_one.ask(CHAT, method="OPTIONS", **asked)
        assert status == 204 and headers["access-control-allow-origin"] == PAGE and "origin" in headers["vary"]
        assert "POST" in headers["access-control-allow-methods"] and headers["access-control-allow-headers"] == "content-type"
        _, headers, _ = open_to_one.ask(CHAT, chat(max_tokens=1), origin=PAGE, authorization="Bearer k")
        assert headers["access-control-allow-origin"] == PAGE
        for other in (open_to_one, server):
            status, headers, _ = other.ask(CHAT, method="OPTIONS", **{**asked, "origin": "https://other.example"})
            assert status in (401, 405) and "access-control-allow-origin" not in headers


def test_the_page_asks_nobody_else(server: Address) -> None:
    status, headers, page = server.ask("/")
    assert status == 200 and "connect-src 'self'" in headers["content-security-policy"]
    assert b"http://" not in page and b"https://" not in page and b"<form" in page


def test_a_model_without_tokenizer_serves_token_ids_and_says_what_it_cannot() -> None:
    with fresh("llama") as llm, serving(llm) as server:
        body = {"prompt": [5, 17, 88], "max_tokens": 3, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        status, answer = server.post(TEXT, body)
        assert status == 200 and len(answer["choices"][0]["token_ids"]) == 3 and answer["choices"][0]["text"] == ""
        for path, body in ((TEXT, text()), (TEXT, text(prompt=[5], stop="x")), (CHAT, chat()), ("/detokenize", {"tokens": [5]})):
            status, answer = server.post(path, body)
            assert status == 400 and "tokenizer" in answer["error"]["message"]


def test_the_openapi_file_names_every_path_and_field_that_is_served(server: Address) -> None:
    told = json.loads(server.ask("/openapi.json")[2])
    paths = "/v1/models /tokenize /detokenize /v1/abort /health /ready /metrics"
    assert set(told["paths"]) >= {CHAT, TEXT, *paths.split()}
    fields = told["components"]["schemas"]["CompletionRequest"]
    assert set(fields["required"]) == {"prompt"} and fields["additionalProperties"] is False
    for name in fields["properties"]:
        if name not in ("prompt", "stream_options"):  # a null stands for absence everywhere
            assert server.post(TEXT, text(max_tokens=1, **{name: None}) if name != "max_tokens" else text(max_tokens=1))[0] == 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer begins texts with BOS, whose template writes BOS too, and which recommends temperature 0."""
    made = write_checkpoint(tmp_path_factory.mktemp("bos") / "tiny", "llama", tokenizer=True)
    for name, more in (
        ("tokenizer_config.json", {"add_bos_token": True, "chat_template": "{{ bos_token }}{{ messages[0].content }}"}),
        ("generation_config.json", {"temperature": 0.0, "do_sample": False, "top_k": 1}),
    ):
        file = made / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    return made


def test_a_prompt_begins_with_one_bos_however_it_came_and_sampling_is_as_openai_says(folder: Path) -> None:
    with LLM(str(folder), device="cpu", context_length=64) as llm, serving(llm) as server:
        bos = server.post("/tokenize", {"prompt": ""})[1]["tokens"]
        plain = server.post("/tokenize", {"prompt": "Hello", "add_special_tokens": False})[1]["tokens"]
        asked = {"return_token_ids": True, "max_tokens": 4, "seed": 2, "ignore_eos": True}
        said = [
            server.post("/tokenize", {"prompt": "Hello"})[1]["tokens"],
            server.post("/tokenize", {"messages": MESSAGES})[1]["tokens"],
            server.post(TEXT, {"prompt": "Hello", **asked})[1]["choices"][0]["prompt_token_ids"],
            server.post(CHAT, chat(**asked))[1]["prompt_token_ids"],
        ]
        assert len(bos) == 1 and said == [[*bos, *plain]] * 4
        drawn, same, greedy = (
            server.post(TEXT, {"prompt": "Hello", **asked, **more})[1]["choices"][0]["token_ids"]
            for more in ({}, {"temperature": 1, "top_p": 1}, {"temperature": 0})
        )
        assert drawn == same != greedy
