import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from thrifty.core.errors import UsageError
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
"""Blocks on lines of their own, a default system message, trimmed contents."""

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
def test_a_template_gives_the_text_that_transformers_gives(theirs, source, messages, prompt):
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **WORDS
    )
    assert ChatTemplate(source, WORDS).render(messages, prompt) == expected


def test_the_prompt_of_alpaca_is_the_published_one_with_and_without_an_input():
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
def test_a_template_that_reaches_for_more_than_messages_is_refused(source):
    with pytest.raises(UsageError, match="the chat template does not accept"):
        print(ChatTemplate(source).render([{"role": "user", "content": "a"}]))
