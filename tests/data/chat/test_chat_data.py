import json

import pytest
import torch
from chat_runs import exchange, small_tokenizer, sums, write_rows

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.objective import ChatLearningSettings
from thrifty.core.recipe import DataSettings
from thrifty.data.chat.chat_data import open_instructions
from thrifty.data.chat.chat_preview import preview
from thrifty.data.chat.chat_template import CHATML
from thrifty.data.chat.chat_tokenizer import TURNS


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path / "sums.jsonl", sums(200))


def opened(file, learning=ChatLearningSettings(), seed=0, say=lambda text: None, **changes):  # noqa: B008
    chosen = {"source": str(file), "vocabulary": 320, "length": 64, "batch": 4, "held_out": 0.2}
    return open_instructions(DataSettings(**{**chosen, **changes}), seed, learning, say)


def conversations(data, batch):
    """Return the text of each conversation in a batch, including its last token."""
    for tokens, targets, segments in zip(batch["tokens"], batch["targets"], batch["segments"], strict=True):
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            yield data.tokenizer.decode([int(tokens[here][0]), *targets[here].tolist()])


def sides(data):
    """Return the texts of all training and all held-out conversations of data with batches of one row."""
    train = [text for step in range(data.train.source.examples) for text in conversations(data, data.train.at(step))]
    return train, [text for batch in data.held_out.batches(999, 8) for text in conversations(data, batch)]


@pytest.mark.parametrize("together", [True, False])
def test_epoch_has_each_conversation_once_on_its_side(file, together):
    data = opened(file, ChatLearningSettings(together=together), batch=1)
    train, held_out = sides(data)
    assert len(train) == len(set(train)) and len(train) + len(held_out) == 200 and not set(train) & set(held_out)
    expected = {data.tokenizer.template.render(row["messages"]).removesuffix("\n") for row in sums(200)}
    assert {*train, *held_out} == expected
    assert 20 <= len(held_out) <= 60


def test_trained_tokenizer_has_turns_and_a_template(file):
    data = opened(file)
    assert [data.tokenizer.inner.id_to_token(number) for number in sorted(data.tokenizer.special)][1:] == list(TURNS)
    assert data.identity.keys() == {
        "train.bin", "held_out.bin", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert (data.folder / "chat_template.jinja").read_text() == CHATML
    assert 0 < data.unigram_entropy < 6 and data.vocabulary <= 320


def test_data_is_prepared_once_and_again_after_changes(file, tmp_path):
    printed = []
    folders = [opened(file, say=printed.append).folder for _ in range(2)]
    assert folders[0] == folders[1] and len([line for line in printed if "preparing" in line]) == 1
    assert opened(file, ChatLearningSettings(everything=True, by_tokens=False, together=False)).folder == folders[0]
    own = tmp_path / "own.jinja"
    own.write_text(CHATML + "{# mine #}")
    changed = [opened(file, ChatLearningSettings(template=name), length=256).folder for name in ("alpaca", str(own))]
    own.write_text(CHATML + "{# mine again #}")
    changed.append(opened(file, ChatLearningSettings(template=str(own))).folder)
    write_rows(file, sums(199))
    changed.append(opened(file).folder)
    assert len({folders[0], *changed}) == 5


def test_damaged_template_is_rebuilt(file):
    data = opened(file)
    (data.folder / "chat_template.jinja").write_text("{{ messages }}")
    printed = []
    assert opened(file, say=printed.append).tokenizer.template.source == CHATML
    assert "chat_template.jinja has another" in printed[0]


def test_seed_orders_training_but_not_evaluation(file):
    one, other = opened(file, seed=0), opened(file, seed=1)
    assert not torch.equal(one.train.at(0)["tokens"], other.train.at(0)["tokens"])
    first, second = (next(data.held_out.batches(8, 8)) for data in (one, other))
    assert all(torch.equal(first[name], second[name]) for name in first.fields)


def test_own_tokenizer_uses_its_template(file, tmp_path):
    source = CHATML.replace("{% for", "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% for", 1)
    small_tokenizer(source).save(tmp_path)
    data = opened(file, tokenizer=str(tmp_path / "tokenizer.json"))
    assert all("Be kind." in text for text in conversations(data, data.train.at(0)))
    assert data.tokenizer.template.source == source


def test_untrainable_conversations_are_refused(file, tmp_path):
    with pytest.raises(UsageError, match=r"no answer in .* begins within data\.length = 3 tokens"):
        opened(file, length=3)
    with pytest.raises(UsageError, match=r"rows to train on, fewer than one batch of 500.*\n.*at most"):
        opened(file, batch=500)
    with pytest.raises(UsageError, match="too few conversations to hold 20% of them out"):
        opened(write_rows(tmp_path / "one.jsonl", [exchange("a", "b")]))
    printed = []
    opened(file, length=32, say=printed.append)
    assert "of the conversations are longer than data.length and are cut" in printed[-1]


def strict(tmp_path, condition):
    """Write a template that refuses conversations."""
    path = tmp_path / "strict.jinja"
    path.write_text(CHATML + "{% if " + condition + " %}{{ raise_exception('not these') }}{% endif %}")
    return ChatLearningSettings(template=str(path))


def test_refused_conversations_are_counted_and_named(file, tmp_path):
    rows = [*sums(200), {"messages": list(reversed(exchange("late?", "Hello!")["messages"]))[:1]}]
    write_rows(
        file,
        [{"messages": [*row["messages"], *rows[-1]["messages"]]} if at == 6 else row for at, row in enumerate(rows)],
    )
    learning = strict(tmp_path, "messages[0].role == 'assistant' or messages | length == 3")
    for _ in range(2):  # prepared once, but reported at each start
        printed = []
        data = opened(file, learning, say=printed.append, batch=1)
        assert "2 conversations are left out" in printed[-1] and "not these" in printed[-1]
        assert f"2 such as {file}, line 7: the chat template does not accept these messages" in printed[-1]
    assert sum(map(len, sides(data))) == 199


def test_tools_of_a_row_are_in_the_tokens(file, tmp_path):
    shows = tmp_path / "shows.jinja"
    shows.write_text("{{ tools | tojson }}" + CHATML)
    write_rows(file, [{**row, "tools": [{"name": f"tool {at}"}]} for at, row in enumerate(sums(200))])
    texts = [text for side in sides(opened(file, ChatLearningSettings(template=str(shows)))) for text in side]
    assert texts and all(text.startswith('[{"name": "tool ') for text in texts)


def test_template_without_accepted_answers_is_refused(file, tmp_path):
    with pytest.raises(UsageError, match=r"too few conversations .*200 conversations are left out"):
        opened(file, strict(tmp_path, "messages[0].content != 'a'"))
    quiet = tmp_path / "quiet.jinja"
    quiet.write_text("{% if messages and messages[0].content == 'a' %}" + CHATML + "{% endif %}")
    with pytest.raises(UsageError, match=r"the chat template writes no answer"):
        opened(file, ChatLearningSettings(template=str(quiet)))


def test_template_at_its_time_limit_ends_preparation(file, tmp_path):
    slow = tmp_path / "slow.jinja"
    loop = "{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}"
    slow.write_text(CHATML + "{% if messages[0].content == 'What is 7 and 0?' %}" + loop + "{% endif %}")
    with pytest.raises(UsageError, match=r"line 8: the chat template takes more than 2 s for one conversation"):
        opened(file, ChatLearningSettings(template=str(slow)))


def test_same_first_question_is_on_one_side_of_the_split(file):
    rows = [exchange(f"{'WHAT' if n % 2 else 'what '} is {n // 4}?", f"Answer {n}.") for n in range(200)]
    data = opened(write_rows(file, rows), batch=1)
    questions = [{text.split("?")[0].casefold().replace(" ", "") for text in side} for side in sides(data)]
    assert all(questions) and not questions[0] & questions[1] and len(questions[0] | questions[1]) == 50


def test_preview_shows_inputs_and_trained_tokens(file):
    settings = DataSettings(source=str(file), vocabulary=320, length=64, held_out=0.2)
    seen = preview(settings, ChatLearningSettings(), 4, say=lambda text: None)
    data = opened(file)
    assert seen.tokens == data.train_tokens and len(seen.examples) == 4
    answers = {row["messages"][1]["content"] + "<|im_end|>" for row in sums(200)}
    for example in seen.examples:
        assert [run.learned for run in example] == [False, True] and example[1].text in answers
        assert data.tokenizer.decode([token for run in example for token in run.tokens]) == "".join(
            run.text for run in example
        )
    everything = preview(settings, ChatLearningSettings(everything=True), 1, say=lambda text: None)
    assert everything.learned == everything.tokens - everything.conversations


def test_damaged_set_is_refused(cache):
    folder = cache / "sets" / "kjv-web"
    folder.mkdir(parents=True)
    (folder / "documents.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (folder / "ORIGIN.json").write_text(json.dumps({"files": {"documents.jsonl": "0" * 64}}))
    with pytest.raises(IntegrityError, match=r"documents\.jsonl is damaged"):
        opened("kjv-web")
