"""Laws of the server, spoken to by the official client: what streams is what is answered is what LLM.generate says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soloist import LLM, SamplingParams
from soloist.testing.checkpoints import write_checkpoint

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

MESSAGES = [{"role": "user", "content": "The train leaves at"}]
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


class Server:
    """A server process on a free port."""

    def __init__(self, model: Path, *flags: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "soloist", "serve", "--model", str(model), "--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*command, "--context-length", "512", *flags], env=environment, stderr=subprocess.DEVNULL)

    def wait(self, path: str = "/ready") -> Server:
        for _ in range(600):
            assert self.process.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(self.url + path, timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError("the server does not get ready")

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def status(self) -> dict[str, Any]:
        return json.loads(urllib.request.urlopen(f"{self.url}/health", timeout=5).read())

    def idle_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.status()["running"] == 0:
                return True
            time.sleep(0.02)
        return False

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "ling-mtp", tokenizer=True)


@pytest.fixture(scope="module", params=["none", "ngram", "mtp"])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    started = Server(model, "--drafter", request.param).wait()
    yield started
    started.end()


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[LLM]:
    with LLM(str(model), context_length=512) as llm:
        yield llm


ASKED = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1, "seed": 7, "max_tokens": 24},
    {"temperature": 0, "max_tokens": 24, "presence_penalty": 1.5},
]


@pytest.mark.parametrize("asked", ASKED, ids=["greedy", "seeded", "penalised"])
def test_stream_and_answer_and_generate_are_one(server: Server, plain: LLM, asked: dict[str, Any]) -> None:
    want = plain.generate(MESSAGES, SamplingParams(**asked, logprobs=2))
    client = server.client()
    body = {"model": "tiny", "messages": MESSAGES, **asked, "logprobs": True, "top_logprobs": 2}
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(**body, extra_body=extra)
    chunks = list(client.chat.completions.create(**body, extra_body=extra, stream=True, stream_options={"include_usage": True}))
    rounds = [chunk.choices[0] for chunk in chunks if chunk.choices]
    choice = whole.choices[0]
    assert choice.message.content == "".join(one.delta.content for one in rounds) == want.text
    assert choice.token_ids == [token for one in rounds for token in one.token_ids] == want.token_ids
    assert choice.finish_reason == rounds[-1].finish_reason == want.finish_reason
    streamed = [token.logprob for one in rounds for token in one.logprobs.content]
    assert streamed == [token.logprob for token in choice.logprobs.content] == [one.logprob for one in want.logprobs]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == want.usage.completion_tokens
    assert whole.usage.total_tokens == chunks[-1].usage.total_tokens == want.usage.total_tokens


def test_a_stop_string_ends_stream_and_answer_alike(server: Server, plain: LLM) -> None:
    text = plain.generate("Water boils", SamplingParams(temperature=0, max_tokens=24)).text
    stop = text[9:11]
    client = server.client()
    body = {"model": "tiny", "prompt": "Water boils", "temperature": 0, "max_tokens": 24, "stop": stop}
    whole = client.completions.create(**body)
    parts = [chunk.choices[0].text for chunk in client.completions.create(**body, stream=True)]
    assert whole.choices[0].text == "".join(parts) == text[: text.find(stop)]
    assert whole.choices[0].finish_reason == "stop"
    other = client.completions.create(**{**body, "stop": "never said"})
    assert other.choices[0].text != whole.choices[0].text


def test_token_id_prompts_and_several_choices(server: Server) -> None:
    client = server.client()
    seeded = client.completions.create(model="tiny", prompt=[5, 17, 88], n=2, seed=3, max_tokens=8)
    second = client.completions.create(model="tiny", prompt=[5, 17, 88], seed=4, max_tokens=8)
    assert [choice.index for choice in seeded.choices] == [0, 1]
    assert seeded.choices[1].text == second.choices[0].text != seeded.choices[0].text
    assert seeded.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "a", "foo": 1}, 400, "foo"),
        ("/v1/completions", {"prompt": "a", "stream_options": {"bar": True}, "stream": True}, 400, "stream_options.bar"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, 400, "best_of"),
        ("/v1/completions", {"prompt": [999999]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [5] * 600}, 400, "prompt"),
        ("/v1/completions", {"prompt": "\ud800"}, 400, None),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/v1/completions", b'{"prompt"', 400, None),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs"),
        ("/v1/abort", {"id": "nobody"}, 404, "id"),
        ("/nowhere", {}, 404, None),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_by_name(server: Server, path: str, body: Any, status: int, param: str | None) -> None:
    got, answer = server.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param) and set(answer["error"]) == {"message", "type", "param", "code"}


def test_tokens_and_text_translate_back(server: Server) -> None:
    ids = server.post("/tokenize", {"prompt": "Fluss über"})[1]["tokens"]
    assert server.post("/detokenize", {"tokens": ids})[1]["prompt"] == "Fluss über"


def test_a_client_that_hangs_up_frees_the_slot(server: Server) -> None:
    with server.client().completions.create(model="tiny", prompt="a", stream=True, extra_body=LONG | {"timings": True}) as stream:
        next(iter(stream))
        assert server.status()["running"] == 1
    assert server.idle_within(2)
    metrics = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    assert 'soloist_requests_cancelled_total{reason="disconnect"}' in metrics


def test_an_abort_ends_a_stream_with_its_reason(server: Server) -> None:
    stream = server.client().completions.create(model="tiny", prompt="a", stream=True, extra_body=LONG)
    first = next(iter(stream))
    assert server.post("/v1/abort", {"id": first.id}) == (200, {"id": first.id, "aborted": True})
    assert list(stream)[-1].choices[0].finish_reason == "cancelled"
    assert server.client().completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].finish_reason == "length"


def test_a_full_queue_says_when_to_come_back(model: Path) -> None:
    server = Server(model, "--max-queue", "0").wait()
    try:
        stream = server.client().completions.create(model="tiny", prompt="a", stream=True, extra_body=LONG)
        next(iter(stream))
        with pytest.raises(openai.APIStatusError) as refused:
            server.client().completions.create(model="tiny", prompt="a")
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
        stream.close()
        assert server.idle_within(2)
    finally:
        server.end()


@pytest.mark.parametrize("moment", ["load", "decode"])
def test_sigterm_ends_the_process_and_frees_the_port(model: Path, moment: str) -> None:
    server = Server(model, "--drain-timeout", "1")
    try:
        server.wait("/health" if moment == "load" else "/ready")
        stream = None
        if moment == "decode":
            stream = server.client().completions.create(model="tiny", prompt="a", stream=True, extra_body=LONG)
            next(iter(stream))
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0 and time.monotonic() - begun < 5
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", server.port))
    finally:
        server.end()


def test_only_the_right_key_opens(model: Path) -> None:
    server = Server(model, "--api-key", "right").wait()
    try:
        assert server.post("/tokenize", {"prompt": "a"})[0] == 401
        right = openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0)
        assert right.models.list().data[0].max_model_len == 512
    finally:
        server.end()


PARAMETERS = {
    "type": "object", "properties": {"n": {"type": "integer", "enum": [1, 2]}}, "required": ["n"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
HERMES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}Answer with <tool_call>{{ tools | tojson }}</tool_call>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def with_tools(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tools") / "tiny", "llama", tokenizer=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": HERMES}))
    started = Server(folder, "--drafter", "ngram").wait()
    yield started
    started.end()


def test_a_required_tool_is_called_alike_in_stream_and_answer(with_tools: Server) -> None:
    """By a model of random weights, so the call is the grammar's doing."""
    client = with_tools.client()
    body = {"model": "tiny", "messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "temperature": 0,
            "max_tokens": 200, "parallel_tool_calls": False}  # fmt: skip
    whole = client.chat.completions.create(**body).choices[0]
    calls = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and [call.function.name for call in calls] == ["look_up"]
    assert json.loads(calls[0].function.arguments)["n"] in (1, 2)
    rounds = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
    deltas = [delta.function for one in rounds for delta in one.delta.tool_calls or ()]
    assert "".join(delta.name or "" for delta in deltas) == "look_up"
    assert "".join(delta.arguments or "" for delta in deltas) == calls[0].function.arguments
    free = client.chat.completions.create(**{**body, "tool_choice": "none", "parallel_tool_calls": True})
    assert not free.choices[0].message.tool_calls


def test_an_answer_keeps_to_its_json_schema(with_tools: Server) -> None:
    schema = {"name": "one", "strict": True, "schema": {"type": "object", "properties": {"a": {"enum": [7]}},
              "required": ["a"], "additionalProperties": False}}  # fmt: skip
    answer = with_tools.client().chat.completions.create(
        model="tiny", messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}, max_tokens=60
    )
    assert json.loads(answer.choices[0].message.content) == {"a": 7}


def test_bad_traffic_leaves_no_stuck_slot_and_the_same_answers(server: Server) -> None:
    asked = {"prompt": "The train", "temperature": 0, "max_tokens": 8}
    before = server.post("/v1/completions", asked)[1]["choices"]
    for i in range(20):
        body = json.dumps({"prompt": [5, i + 3], "max_tokens": 300, "ignore_eos": True, "stream": i % 2 == 0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            gone.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(i % 5 / 100)
        assert server.post("/v1/completions", b"{")[0] == 400
        assert server.post("/v1/completions", {"prompt": [5] * 9000})[0] == 400
    assert server.idle_within(2) and server.status()["waiting"] == 0
    assert server.post("/v1/completions", asked)[1]["choices"] == before
