import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from thrifty.core.errors import UsageError
from thrifty.data.chat import chat_template
from thrifty.data.chat.chat_template import ALPACA, CHATML, ChatTemplate

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "You are helpful." %}
{%- endif %}
{{- "<|head|>system<|end|>\\n\\n" + system + eos_token }}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + message.role) }}{% endif %}
    {{- '<|head|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|head|>assistant<|end|>\\n\\n' }}
{% endif %}"""
"""Template with blocks on separate lines, a default system message and trimmed contents."""

LOOPING = """{% for message in messages %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if message.role == 'system' %}{% continue %}{% endif %}
[{{ message | tojson }}]
{% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}"""

WORDS = {"bos_token": "<s>", "eos_token": "</s>"}


@st.composite
def conversation(draw):
    text = st.text(max_size=12)
    system = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    turns = draw(st.lists(text, min_size=1, max_size=4))
    roles = ("user", "assistant")
    return [*system, *({"role": roles[at % 2], "content": text} for at, text in enumerate(turns))]


@pytest.fixture(scope="module")
def theirs():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **WORDS)


@pytest.mark.parametrize("source", [CHATML, ALPACA, LLAMA_LIKE, LOOPING])
@settings(max_examples=40)
@given(messages=conversation(), prompt=st.booleans())
def test_template_text_equals_transformers(theirs, source, messages, prompt):
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **WORDS
    )
    assert ChatTemplate(source, WORDS).render(messages, prompt) == expected


def test_alpaca_prompt_equals_the_published_one():
    ask = {"role": "user", "content": "Add.\n\n1 and 2", "instruction": "Add.", "input": "1 and 2"}
    assert ChatTemplate(ALPACA, WORDS).render([ask], prompt=True) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n"
        "### Response:\n"
    )
    short = [{"role": "user", "content": "Add."}, {"role": "assistant", "content": "3"}]
    assert ChatTemplate(ALPACA, WORDS).render(short) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Response:\n3</s>\n\n"
    )


ZEPHYR_LIKE = """{% for message in messages %}
{% if message.role == 'user' %}<|user|>{{ message.content }}{{ eos_token }}
{% elif message.role == 'system' %}<|system|>{{ message.content }}{{ eos_token }}
{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}{{ eos_token }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""Template that silently leaves out other roles."""
VICUNA_LIKE = (
    "{% for message in messages %}{{ 'USER: ' if message.role == 'user' else 'ASSISTANT: ' }}{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
KNOWS_TOOLS = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED, SAID = {"role": "user", "content": "1 and 2?"}, {"role": "assistant", "content": "3"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": [1, 2]}]}
TOOL, DEVELOPER = {"role": "tool", "content": "3"}, {"role": "developer", "content": "Be brief."}


@pytest.mark.parametrize(
    ("source", "messages", "why"),
    [
        (ZEPHYR_LIKE, [ASKED, TOOL, SAID], "leaves out messages of the role 'tool'"),
        (ZEPHYR_LIKE, [DEVELOPER, ASKED, SAID], "leaves out messages of the role 'developer'"),
        (VICUNA_LIKE, [ASKED, TOOL, SAID], "writes the role 'tool' as 'assistant'"),
        (ALPACA, [ASKED, TOOL, SAID], "no role tool"),
        (CHATML, [ASKED, CALL, TOOL, SAID], "leaves out calls of tools"),
    ],
)
def test_role_unknown_to_the_template_is_refused(source, messages, why):
    with pytest.raises(UsageError, match=f"the chat template does not accept these messages: .*{why}"):
        ChatTemplate(source, WORDS).write(messages)


def test_known_roles_and_calls_are_written():
    for source, messages in (
        (KNOWS_TOOLS, [DEVELOPER, ASKED, CALL, TOOL, SAID]),
        (CHATML, [DEVELOPER, ASKED, TOOL, SAID]),
        (ALPACA, [DEVELOPER, ASKED, SAID]),
    ):
        written = ChatTemplate(source, WORDS).write(messages)
        answers = [written.text[begin:end] for begin, end in written.answers]
        assert len(answers) == sum(message["role"] == "assistant" for message in messages)
        assert answers[-1].startswith("3") and all(message["content"] in written.text for message in messages)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("'' + called.arguments", '{"città": {"a": null}}'),
        ("(called.arguments | items | list) ~ ''", "[('città', {'a': None})]"),
    ],
)
def test_arguments_are_text_only_where_objects_fail(written, text):
    source = "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}"
    source += "{% set called = call.function %}{{ " + written + " }}{% endfor %}{{ eos_token }}{% endfor %}"
    call = {"function": {"name": "add", "arguments": {"città": {"a": None}}}}
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, SAID]
    found = ChatTemplate(source, WORDS).write(messages)
    assert [found.text[begin:end] for begin, end in found.answers] == [text + "</s>", "3</s>"]
    with pytest.raises(UsageError, match="can only concatenate str"):
        ChatTemplate("{{ 'a' + 1 }}").write(messages)


GLM_LIKE = """{%- set last = namespace(question=-1) %}
{%- for message in messages if message.role == 'user' %}{% set last.question = messages.index(message) %}{% endfor %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}
{{- '<think>' + (message.reasoning_content or '' if CONDITION else '') + '</think>' }}
{%- endif %}
{{- message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""Template that omits the reasoning of earlier turns."""


@pytest.mark.parametrize(
    ("condition", "kept"),
    [("true", ["A", "B", "C"]), ("loop.index0 > last.question", ["", "B", "C"]), ("loop.last", ["", "", ""])],
)
def test_reasoning_is_kept_where_later_turns_do_not_remove_it(condition, kept):
    thinking = [{**SAID, "reasoning_content": thought} for thought in "ABC"]
    messages = [ASKED, thinking[0], {**ASKED, "content": "And?"}, thinking[1], TOOL, thinking[2]]
    found = ChatTemplate(GLM_LIKE.replace("CONDITION", condition), WORDS).write(messages)
    answers = [found.text[begin:end] for begin, end in found.answers]
    assert answers == [f"<think>{thought}</think>3</s>" for thought in kept]


def test_template_must_write_the_tools():
    tools, messages = [{"type": "function", "function": {"name": "add"}}], [ASKED, CALL, TOOL, SAID]
    source = "{% if tools is not none %}{{ tools | tojson }}{{ eos_token }}{% endif %}" + KNOWS_TOOLS
    written = ChatTemplate(source, WORDS).write(messages, tools=tools)
    plain = ChatTemplate(source, WORDS).write(messages)
    assert written.text == json.dumps(tools) + WORDS["eos_token"] + plain.text
    assert [written.text[begin:end] for begin, end in written.answers] == [
        plain.text[begin:end] for begin, end in plain.answers
    ]
    with pytest.raises(UsageError, match="leaves out the tools that can be called"):
        ChatTemplate(KNOWS_TOOLS, WORDS).write(messages, tools=tools)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}", "more than 2 s"),
        ("{{ 'a' * 10**9 }}", "more than 512 MB"),
        ("{% for a in range(10**5) %}{{ 'a' * 10**4 }}{% endfor %}", "more than 512 MB"),
        ("{{ 'a' * 10**8 }}", "writes 100,000,000 characters, but at most 1,000,000"),
        ("{{ '%1000000000d' % 1 }}", "more than 512 MB"),
        ("{{ " + "(" * 10**5, "does not accept"),
    ],
)
def test_template_at_its_limit_is_stopped_and_the_next_runs(source, why):
    with pytest.raises(UsageError, match=f"the chat template .*{why}"):
        ChatTemplate(source).render([ASKED])
    assert ChatTemplate(VICUNA_LIKE, WORDS).render([ASKED], prompt=True) == "USER: 1 and 2?</s>ASSISTANT: "


def test_many_conversations_are_written_by_one_process():
    template = ChatTemplate(VICUNA_LIKE, WORDS)
    template.render([ASKED])
    before = chat_template._SANDBOX.process.pid
    assert {template.render([{"role": "user", "content": str(number)}]) for number in range(100)} == {
        f"USER: {number}</s>" for number in range(100)
    }
    assert chat_template._SANDBOX.process.pid == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000000) %}{{ i }}{% endfor %}",
        "{{ open('/etc/passwd') }}",
        "{{ raise_exception('not like this') }}",
        "{% if %}",
    ],
)
def test_template_cannot_read_more_than_messages(source):
    with pytest.raises(UsageError, match="the chat template does not accept"):
        print(ChatTemplate(source).render([{"role": "user", "content": "a"}]))
