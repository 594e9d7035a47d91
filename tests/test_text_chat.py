"""Chat templates: the prompt that transformers makes, in a sandbox, with clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from soloist.errors import UserError
from soloist.text.chat import ChatTemplates
from soloist.text.source import TokenizerSource
from soloist.text.tokenizer import Tokenizer
from tests.vocabularies import byte_level

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""
TOOLS = """{{- bos_token }}{% for m in messages %}
{%- if m.role == 'tool' %}{{ raise_exception('Tool results are not\n  supported') }}{% endif %}
{%- if m.role == 'skip' %}{% continue %}{% endif %}
{%- generation %}{{- m.content }}{% endgeneration %}
{%- for call in m.tool_calls or [] %}{{ '<call>' ~ call.function.name ~ (call.function.arguments | tojson) }}{% endfor %}
{%- endfor %}{% for tool in tools or [] %}{{- tool | tojson(indent=1) }}{% endfor %}"""
USER = [{"role": "user", "content": "Hi <b>&'é"}]
HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{% for i in range(100000000) %}{% endfor %}",
    "{{ ''|attr('__class__')|attr('__mro__')|join }}{{ ().__class__.__base__.__subclasses__() }}",
]


def render(template: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}, "here.json").render(messages, **variables)


def test_chatml_takes_lines_of_statements_out() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n\n<|im_start|>user\nHi <b>&'é<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "assistant" not in render(CHATML, add_generation_prompt=False)


def test_tools_calls_loop_controls_and_marks() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<é>"}'}}
    messages = [*USER, {"role": "skip", "content": "no"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = render(TOOLS, messages, tools=[{"name": "f&g"}])
    assert text == '<s>Hi <b>&\'é<call>f{"a": "<é>"}{\n "name": "f&g"\n}'
    assert call["function"]["arguments"] == '{"a": "<é>"}', "the caller's messages must stay as they are"


def test_a_template_for_tools_is_used_where_there_are_tools() -> None:
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"}, {}, "t")
    assert templates.render(USER) == "plain" == templates.render(USER, tools=[])
    assert templates.render(USER, tools=[{"name": "f"}]) == "tools"


def test_variables_reach_the_template_and_unknown_ones_are_empty() -> None:
    assert render("{{ enable_thinking }}|{{ nothing }}|{{ nothing is defined }}", enable_thinking=True) == "True||False"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_what_a_template_reads_is_known_by_name_and_not_by_its_letters() -> None:
    text = "{% if not date is defined %}{% set date = strftime_now('%Y') %}{% endif %}{{ date }}{% set own = think %}{{ own }}"
    assert ChatTemplates({"default": text, "tool_use": "{{ tools }}"}, {}, "t").variables == {"date", "think", "tools"}
    with pytest.raises(UserError, match="damaged"):
        ChatTemplates({"default": "{% if %}"}, {}, "t").variables


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize("template", HOSTILE)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(UserError, match="here.json: the chat template refuses"):
        render(template)


def test_the_same_template_escapes_outside_the_sandbox() -> None:
    """Negative control: without the sandbox the first attack works."""
    import jinja2

    assert "class" in jinja2.Environment().from_string(HOSTILE[0]).render()


@pytest.mark.parametrize(
    ("template", "messages", "complaint"),
    [
        (TOOLS, [{"role": "tool", "content": "x"}], "Tool results are not supported"),
        ("{{ messages[0].content + 1 }}", USER, "str"),
        ("{{ messages[9].content }}", USER, "no element 9|undefined"),
        ("{% if %}", USER, "damaged"),
        ("{{ 1 // 0 }}", USER, "zero"),
        ("x", [], "messages is empty"),
        ("x", ["hello"], r"messages\[0\] is a str"),
        ("x", [{"content": "a"}], "role=None"),
        ("x", [{"role": "user"}], "no content"),
        ("x", [{"role": "user", "content": 3}], r"content is a int"),
        ("x", [{"role": "user", "content": [{"type": "image_url"}]}], "kind 'image_url'"),
        ("x", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not valid JSON"),
        ("x", [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "JSON object"),
        ("x", [{"role": "assistant", "tool_calls": [{}]}], "must name its function"),
    ],
)
def test_refusals_are_one_line_and_say_what_came(template: str, messages: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as refused:
        render(template, messages)
    assert "\n" not in str(refused.value)


def test_a_model_without_template_says_so() -> None:
    own = Tokenizer(TokenizerSource(byte_level().to_str(), "here.json"))
    assert not own.has_chat_template
    with pytest.raises(UserError, match="here.json: the model has no chat template"):
        own.render_chat(USER)
    with pytest.raises(UserError, match="no default chat template, only rag"):
        ChatTemplates({"rag": "x"}, {}, "t").render(USER)
    with pytest.raises(UserError, match="tools must be a list"):
        render("x", tools="f")
    with pytest.raises(UserError, match="tools must be a list"):
        render("x", tools=["f"])


@pytest.mark.oracle
@pytest.mark.parametrize("template", [CHATML, TOOLS.replace("{%- generation %}", "").replace("{% endgeneration %}", "")])
def test_prompts_are_those_of_transformers(template: str) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>")
    own = Tokenizer(TokenizerSource(byte_level().to_str(), "t", {"default": template}, {"bos_token": "<s>"}))
    messages = [{"role": "system", "content": "S"}, *USER, {"role": "assistant", "content": " x\n"}]
    for tools in (None, [{"name": "f&g", "z": 1, "a": "é"}]):
        expected = oracle.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
        assert own.render_chat(messages, add_generation_prompt=False, tools=tools) == expected
