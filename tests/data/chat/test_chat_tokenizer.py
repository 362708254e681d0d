import json

import pytest
from chat_runs import TEXT, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.tokenizer_files import END_OF_TEXT
from thrifty.data.chat.chat_template import ALPACA, CHATML, ChatTemplate
from thrifty.data.chat.chat_tokenizer import ChatTokenizer, read_chat_tokenizer, template_source

WITH_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are small.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "alpaca": ALPACA, "with system": WITH_SYSTEM}
TOKENIZERS = {name: small_tokenizer(source) for name, source in TEMPLATES.items()}

awkward = st.lists(
    st.one_of(
        st.sampled_from(["<|im_end|>", "<|im_start|>", END_OF_TEXT, "<|im_start|>assistant\n", "### Response:\n"]),
        st.sampled_from(["\n", " ", "\n\n", "\ufdd0", "\ufdd1", "a", "capital", "<", "|>", "<|im_", "🙂", "\u200d"]),
        st.text(max_size=6),
    ),
    max_size=6,
).map("".join)
"""Texts that look like a template's output, end within a special token, or contain marks of positions."""


@st.composite
def conversation(draw, text=awkward):
    system = [{"role": "system", "content": draw(text)}] if draw(st.booleans()) else []
    pairs = draw(st.lists(st.tuples(text, text), min_size=1, max_size=3))
    turns = [({"role": "user", "content": q}, {"role": "assistant", "content": a}) for q, a in pairs]
    return [*system, *(message for turn in turns for message in turn)]


def encoded(tokenizer, messages):
    return next(tokenizer.encode_pieces([tokenizer.pieces(messages)]))


def learned_runs(found):
    runs, before = [], False
    for token, learned in zip(found.tokens, found.answer, strict=True):
        if learned:
            runs = [*runs[:-1], [*runs[-1], token]] if before else [*runs, [token]]
        before = learned
    return runs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=150)
@given(messages=conversation())
def test_answers_and_their_end_tokens_are_trained(name, messages):
    tokenizer = TOKENIZERS[name]
    found = encoded(tokenizer, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    if name == "with system":
        answers = [answer.strip() for answer in answers]
    runs = learned_runs(found)
    assert all(run[-1] == tokenizer.end_of_turn for run in runs)
    assert [tokenizer.decode(run[:-1]) for run in runs] == answers
    assert tokenizer.decode(found.tokens) == tokenizer.template.render(messages)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=150)
@given(messages=conversation())
def test_message_cannot_write_a_special_token(name, messages):
    tokenizer = TOKENIZERS[name]
    harmless = [message | {"content": "a"} for message in messages]
    special, expected = (
        [token for token in encoded(tokenizer, each).tokens if token in tokenizer.special]
        for each in (messages, harmless)
    )
    assert special == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=100)
@given(messages=conversation())
def test_answer_follows_exactly_the_tokens_of_a_chat(name, messages):
    tokenizer = TOKENIZERS[name]
    found = encoded(tokenizer, messages)
    begins = [at for at, learned in enumerate(found.answer) if learned and not found.answer[at - 1]]
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert [found.tokens[:begin] for begin in begins] == [tokenizer.prompt(messages[:place]) for place in places]


@pytest.mark.parametrize("name", ["chatml", "with system"])
@settings(max_examples=60)
@given(messages=conversation(st.text(st.characters(codec="utf-8", exclude_characters="<\ufdd0"), max_size=10)))
def test_tokens_equal_transformers_without_special_spellings(name, messages):
    tokenizer = TOKENIZERS[name]
    messages = [
        message | {"content": "x" + message["content"]} for message in messages
    ]  # without white space, which could merge
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.inner.to_str()))
    expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], return_dict=False)
    assert encoded(tokenizer, messages).tokens == expected


def test_answers_of_weight_0_are_written_but_not_learned():
    tokenizer = TOKENIZERS["chatml"]
    contents = {"a": "user", "b": "assistant", "c": "user", "d": "assistant"}
    turns = [{"role": role, "content": content} for content, role in contents.items()]
    found = encoded(tokenizer, [turns[0], {**turns[1], "weight": 0}, *turns[2:]])
    assert found.tokens == encoded(tokenizer, turns).tokens
    assert [tokenizer.decode(run[:-1]) for run in learned_runs(found)] == ["d"]


def test_tokenizer_files_are_those_of_transformers(tmp_path):
    TOKENIZERS["with system"].save(tmp_path)
    again = read_chat_tokenizer(tmp_path / "tokenizer.json")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert again.template.source == WITH_SYSTEM and again.end_of_turn == 2
    assert encoded(again, messages) == encoded(TOKENIZERS["with system"], messages)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == again.end_of_turn
    assert theirs.apply_chat_template(messages, return_dict=False) == encoded(again, messages).tokens
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": CHATML}]
    for template in (CHATML, named):
        config = {"chat_template": template, "eos_token": {"content": "<|im_end|>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert read_chat_tokenizer(tmp_path / "tokenizer.json").template.source == CHATML
    assert read_chat_tokenizer(tmp_path / "tokenizer.json", "alpaca").template.source == ALPACA


def test_special_tokens_choose_the_default_template(tmp_path):
    plain = small_tokenizer()
    assert plain.template.source == CHATML
    plain.inner.save(str(tmp_path / "tokenizer.json"))
    assert read_chat_tokenizer(tmp_path / "tokenizer.json").template.source == CHATML
    without = byte_level([END_OF_TEXT])
    without.save(str(tmp_path / "tokenizer.json"))
    base = read_chat_tokenizer(tmp_path / "tokenizer.json")
    assert base.template.source == ALPACA and base.end_of_turn == without.token_to_id(END_OF_TEXT)


def byte_level(special, splitter=None):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(TEXT, trainer)
    return inner


def test_template_that_changes_earlier_turns_is_refused():
    only_last = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{{ message.content if loop.last or message.role == 'user' else '(left out)' }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = small_tokenizer(only_last)
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    assert learned_runs(encoded(tokenizer, turns[:2]))
    with pytest.raises(UsageError, match="changes earlier turns when later turns follow"):
        tokenizer.pieces(turns)


def test_untrainable_templates_and_tokenizers_are_refused(tmp_path):
    endless = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    with pytest.raises(RefusedError, match="does not end answers with a special token"):
        small_tokenizer(endless)
    prefixing = byte_level([END_OF_TEXT], pre_tokenizers.Metaspace(prepend_scheme="first"))
    with pytest.raises(RefusedError, match="splits text differently after"):
        ChatTokenizer(prefixing, ChatTemplate(ALPACA))
    with pytest.raises(UsageError, match="did you mean 'chatml'"):
        template_source("chatm")
    noncharacters = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    with pytest.raises(UsageError, match="every noncharacter"):
        small_tokenizer().pieces([{"role": "user", "content": noncharacters}])


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer_config.json", b"[]", "does not contain a JSON object"),
        ("tokenizer_config.json", b"[" * 100_000, "is not readable JSON"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is 3"),
        (
            "tokenizer_config.json",
            b'{"chat_template": [{"name": "default", "template": []}]}',
            r"chat_template is \[\]",
        ),
        ("chat_template.jinja", b"\xff", "is not UTF-8 text"),
    ],
)
def test_damaged_file_of_a_tokenizer_is_named(tmp_path, name, content, what):
    small_tokenizer().save(tmp_path)
    for beside in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / beside).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}.*{what}"):
        read_chat_tokenizer(tmp_path / "tokenizer.json")


def test_special_words_of_another_type_are_ignored(tmp_path):
    small_tokenizer().save(tmp_path)
    config = {"eos_token": {"word": "a"}, "bos_token": ["b"], "chat_template": [3, {"name": "default"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_chat_tokenizer(tmp_path / "tokenizer.json").template.words == {"eos_token": "<|endoftext|>"}
