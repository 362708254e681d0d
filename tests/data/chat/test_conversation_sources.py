import json

import pytest
from chat_runs import exchange, write_rows

from thrifty.core.errors import UsageError
from thrifty.data.catalogue import PYTHON_FUNCTIONS
from thrifty.data.chat.conversation_sources import ConversationTable, PythonFunctions, conversations, open_conversations
from thrifty.data.download.text_extractors import modern_verses
from thrifty.data.text.python_sources import described_functions


def read(path):
    return [each.messages for each in conversations(open_conversations(str(path)))]


def test_every_form_has_the_same_messages(tmp_path):
    question, reply = {"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}
    rows = [
        {"messages": [question, reply]},
        {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]},
        {"instruction": "How?", "input": "", "output": "So."},
        {"instruction": "How?", "output": "So.", "id": 7},
        {"prompt": "How?", "completion": "So."},
    ]
    expected = [[question, reply]] * len(rows)
    assert read(write_rows(tmp_path / "a.jsonl", rows)) == expected
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert read(tmp_path / "a.json") == expected


def test_conversations_are_read_from_every_table(tmp_path):
    row, expected = exchange("How?", "So."), [exchange("How?", "So.")["messages"]]
    (tmp_path / "a.csv").write_text("prompt;completion\nHow?;So.\n")
    (tmp_path / "b.tsv").write_text('messages\n"' + json.dumps(row["messages"]).replace('"', '""') + '"\n')
    write_rows(tmp_path / "c.jsonl", [row])
    for name in ("a.csv", "b.tsv", "c.jsonl"):
        assert read(tmp_path / name) == expected, name
    assert read(tmp_path) == 3 * expected
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([row])
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "d.parquet")
    assert read(tmp_path / "saved") == read(tmp_path / "d.parquet") == expected


def test_text_parts_of_a_turn_are_joined_others_refused(tmp_path):
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "so?"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "So."}]}
    assert read(write_rows(tmp_path / "a.jsonl", [row])) == [exchange("How so?", "So.")["messages"]]
    for strange in ([*parts, {"type": "image", "url": "a.png"}], [], [None]):
        row["messages"][0]["content"] = strange
        with pytest.raises(UsageError, match="turn 1: 'content' holds list, not text"):
            read(write_rows(tmp_path / "b.jsonl", [row]))


def test_tool_calls_and_results_are_messages(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    question, reply = exchange("How?", "So.")["messages"]
    row = {
        "messages": [{"role": "developer", "content": "Be brief."}, question, call, {"role": "tool", "content": "3"}]
    }
    [read_back] = read(write_rows(tmp_path / "a.jsonl", [{"messages": [*row["messages"], reply]}]))
    assert read_back == [*row["messages"][:2], {**call, "content": ""}, *row["messages"][3:], reply]
    turns = [("system", "Be."), ("human", "How?"), ("observation", "3"), ("gpt", "So.")]
    shared = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    [read_back] = read(write_rows(tmp_path / "b.jsonl", [shared]))
    assert [message["role"] for message in read_back] == ["system", "user", "tool", "assistant"]


def test_sharegpt_calls_and_tools_as_list_or_text(tmp_path):
    call, tools = {"name": "add", "arguments": {"a": 1}}, [{"type": "function", "function": {"name": "add"}}]
    turns = [("human", "How?"), ("function_call", json.dumps(call)), ("observation", "3"), ("gpt", "So.")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    rows = [{**row, "tools": tools}, {**row, "tools": json.dumps(tools)}, {**row, "tools": None}, row]
    written = list(conversations(open_conversations(str(write_rows(tmp_path / "a.jsonl", rows)))))
    assert [each.tools for each in written] == [tools, tools, [], []]
    assert all(each.messages == written[0].messages for each in written)
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    assert written[0].messages[1:3] == [calling, {"role": "tool", "content": "3"}]


def test_arguments_of_calls_are_objects_with_their_nulls(tmp_path):
    question, reply = exchange("How?", "So.")["messages"]
    text, plain = {"name": "add", "arguments": '{"a": 1, "b": null}'}, {"name": "put", "arguments": "not JSON"}
    calls = [{"type": "function", "function": each} for each in (text, plain)]
    object_call = {"function": {"name": "add", "arguments": {"a": 1, "limit": None, "more": [{"b": None, "c": 2}]}}}
    tools = [{"function": {"name": "add", "parameters": {"a": {"type": "int", "default": None}}}}]
    answers = [{"role": "assistant", "tool_calls": called} for called in (calls, [object_call])]
    turns = [question, *answers, reply]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": turns, "tools": tools}])
    [each] = conversations(open_conversations(str(path)))
    first, second = each.messages[1:3]
    assert first["content"] == "" and first["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    assert first["tool_calls"][1] == calls[1]
    assert second["tool_calls"] == [object_call] and each.tools == tools
    turns = [{"from": "human", "value": "How?"}, {"from": "function_call", "value": json.dumps(text)}]
    [[_, shared]] = read(write_rows(tmp_path / "b.jsonl", [{"conversations": turns}]))
    assert shared["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}


def test_calls_of_a_table_are_written_like_those_of_json(tmp_path):
    datasets = pytest.importorskip("datasets")
    question, reply = exchange("How?", "So.")["messages"]
    first, second = ({"type": "function", "function": {"name": name, "arguments": {name: 1}}} for name in ("a", "b"))
    rows = [{"messages": [question, {"role": "assistant", "content": content, "tool_calls": [call]}, reply],
             "tools": [{"function": {"name": name, "parameters": {name: {"type": "int"}}}}]}
            for name, content, call in (("a", "", first), ("b", None, second))]  # fmt: skip
    saved = datasets.Dataset.from_list(rows)
    saved.to_parquet(tmp_path / "a.parquet")
    saved.save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "a.jsonl", rows)
    for name in ("a.parquet", "saved"):
        written = [each[1:] for each in conversations(open_conversations(str(tmp_path / name)))]
        assert written == [each[1:] for each in conversations(open_conversations(str(tmp_path / "a.jsonl")))], name


def test_alpaca_input_and_system_message(tmp_path):
    row = {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"}
    [[system, question, reply]] = read(write_rows(tmp_path / "a.jsonl", [row]))
    assert system == {"role": "system", "content": "Be brief."}
    assert question == {"role": "user", "content": "Add.\n\n1 2", "instruction": "Add.", "input": "1 2"}
    assert reply == {"role": "assistant", "content": "3"}


def test_a_system_prompt_of_a_row_opens_every_form(tmp_path):
    opening, expected = {"role": "system", "content": "Be brief."}, exchange("How?", "So.")["messages"]
    turns = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]
    forms = [{"messages": expected}, {"conversations": turns}, {"prompt": "How?", "completion": "So."},
             {"instruction": "How?", "output": "So."}, {"messages": [opening, *expected]}]  # fmt: skip
    rows = [{**form, key: "Be brief."} for form in forms for key in ("system", "system_prompt")]
    rows = [*rows, *({**form, "system": other} for form in forms[:4] for other in (None, True, ["Be brief."]))]
    read_back = read(write_rows(tmp_path / "a.jsonl", rows))
    assert read_back == [[opening, *expected]] * 10 + [expected] * 12


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_has_one_system_message(tmp_path, role):
    turns = [{"role": role, "content": "Be brief."}, *exchange("How?", "So.")["messages"]]
    row = {"messages": turns, "system": "Be brief. "}
    assert read(write_rows(tmp_path / "a.jsonl", [row])) == [turns]


def test_keys_that_templates_read_are_passed_on(tmp_path):
    call = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "3", "name": "f", "tool_call_id": "c1"}
    question, reply = exchange("How?", "So.")["messages"]
    expected = [question, call, result, reply]
    row = {"messages": [question, call, result, {**reply, "name": None, "reasoning_content": ["Hm."], "other": 1}]}
    assert read(write_rows(tmp_path / "a.jsonl", [row])) == [expected]
    row["messages"][2], expected[2] = {**result, "tool_call_id": 0}, {**result, "tool_call_id": "0"}
    assert read(write_rows(tmp_path / "b.jsonl", [row])) == [expected]


def test_answers_of_weight_0_end_no_conversation(tmp_path):
    question, reply = exchange("How?", "So.")["messages"]
    unlearned, learned = {**reply, "weight": 0}, {**reply, "weight": 1}
    rows = [
        {"messages": turns} for turns in ([question, unlearned, question, learned, unlearned], [question, unlearned])
    ]
    assert read(write_rows(tmp_path / "a.jsonl", rows)) == [[question, unlearned, question, reply]]
    turns = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "No.", "weight": 0}]
    row = {"conversations": [*turns, {"from": "gpt", "value": "So.", "weight": None}]}
    assert read(write_rows(tmp_path / "b.jsonl", [row])) == [[question, {**unlearned, "content": "No."}, reply]]


def test_history_of_alpaca_comes_before_the_question(tmp_path):
    row = {"instruction": "And?", "output": "So.", "history": [["How?", "Thus."]], "system": "Be brief."}
    expected = [*exchange("How?", "Thus.")["messages"], *exchange("And?", "So.")["messages"]]
    shared = [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "Thus."}]
    histories = [row["history"], json.dumps(row["history"]), exchange("How?", "Thus.")["messages"], shared]
    others = ["How? Thus.", "3", 3, [["How?"]], [["How?", "Thus."], "And?"], [{"question": "How?"}], None]
    read_back = read(write_rows(tmp_path / "a.jsonl", [{**row, "history": each} for each in [*histories, *others]]))
    opening = {"role": "system", "content": "Be brief."}
    assert read_back == [[opening, *expected]] * len(histories) + [[opening, *expected[2:]]] * len(others)


def test_turns_after_the_last_answer_are_dropped(tmp_path):
    unanswered = {"messages": [*exchange("a", "b")["messages"], {"role": "user", "content": "and?"}]}
    blank = [exchange("a", " \n"), {"instruction": "a", "output": None}, {"messages": []}]
    path = write_rows(tmp_path / "a.jsonl", [unanswered, *blank])
    assert read(path) == [exchange("a", "b")["messages"]]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"text": "no conversation"}', "line 2: no conversation, but the keys text"),
        ('{"messages": "hello"}', "line 2: 'messages' holds str, not a list"),
        ('{"messages": [{"role": "user", "content": "a"}, "b"]}', "line 2, turn 2: not a message"),
        ('{"messages": [{"role": "usr", "content": "a"}]}', "line 2, turn 1: unknown role 'usr'.*\n.*'user'"),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', "line 2, turn 1: 'content' holds list"),
        ('{"conversations": [{"from": "human"}]}', "line 2, turn 1: not a message"),
        ('{"conversations": [{"from": "function_call", "value": "add"}]}', "line 2, turn 1: not valid JSON"),
        ('{"conversations": [{"from": "function_call", "value": "{}"}]}', "line 2, turn 1: not a call of a tool"),
        ('{"prompt": "a", "completion": "b", "tools": "3"}', "line 2: 'tools' holds int, not a list"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', "0.5, not 0 or 1.*\n.*same weight"),
        ('{"instruction": "a", "output": "b", "history": [{"role": "usr"}]}', "turn 1 of 'history': not a message"),
        ('{"messages": [{"role": "assistant", "tool_calls": [3]}]}', "turn 1: 'tool_calls' holds .* list of calls"),
        ('{"instruction": 3, "output": "a"}', "line 2: 'instruction' holds int, not text"),
        ('{"prompt": "\\ud800", "completion": "a"}', "line 2: 'prompt' holds half of a surrogate pair"),
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: a JSON list"),
    ],
)
def test_invalid_row_is_named_by_its_line(tmp_path, row, what):
    (tmp_path / "a.jsonl").write_text(json.dumps(exchange("a", "b")) + "\n" + row + "\n")
    with pytest.raises(UsageError, match=what):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("content", "what"),
    [("[1]", "row 1: a JSON int"), ("{}", "no conversation, but the keys"), ("[", "not valid JSON")],
)
def test_invalid_list_is_refused(tmp_path, content, what):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match=what):
        read(tmp_path / "a.json")


def test_other_sources_than_conversations_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for source, what in (
        ("kjv", "'kjv' is of kind 'text', not a set of conversations"),
        ("smollm2-135m", "is of kind 'model'"),
        ("kjv-web", "not on this machine yet.*\n.*thrifty data get kjv-web"),
        (str(tmp_path / "a.txt"), r"is not a table or a folder of tables"),
        (str(tmp_path / "absent.jsonl"), "neither a file nor a known set"),
    ):
        with pytest.raises(UsageError, match=what):
            open_conversations(source)


def test_a_file_that_changes_has_another_identity(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [exchange("a", "b")])
    before = ConversationTable((path,)).identity()
    write_rows(path, [exchange("a", "bb")])
    assert ConversationTable((path,)).identity() != before


def test_docstrings_are_questions_for_functions(tmp_path):
    source = '''
class Shape:
    def area(self, scale=1):
        """The area of the shape in square metres,
        after scaling."""
        side = self.side * scale
        return side * side

    def short(self):
        """Too little said."""
        return 1

    def only_said(self):
        """A docstring that is long enough, and no body at all follows."""
'''
    (tmp_path / "a.py").write_text(source)
    [(question, answer)] = described_functions(tmp_path / "a.py")
    assert question == "Write the Python function `area`. The area of the shape in square metres,\nafter scaling."
    assert answer == "def area(self, scale=1):\n    side = self.side * scale\n    return side * side"
    (tmp_path / "b.py").write_text("def broken(:\n")
    assert not list(described_functions(tmp_path / "b.py"))


def test_python_functions_require_no_download():
    assert isinstance(open_conversations(PYTHON_FUNCTIONS), PythonFunctions)
    first = next(conversations(PythonFunctions())).messages
    assert first[0]["content"].startswith("Write the Python function") and first[1]["content"].startswith("def ")


def test_verses_are_matched_by_their_numbers():
    def bible(verses):
        text = " ".join(verses.values())
        starts, ends, at = {}, {}, 0
        for number, verse in verses.items():
            starts[number], ends[number] = at, at + len(verse)
            at += len(verse) + 1
        return f"bible = Bible(1, {text!r}, {starts}, {ends}, False)".encode()

    old = bible({1001001: "And [he] saith,", 1001002: "  unto\n them ", 1001003: "Verily."})
    modern = bible({1001002: "to God`s people", 1001001: "He said,", 1001004: "Amen."})
    rows = list(modern_verses({"a/bible.py": old, "b/bible.py": modern}))
    assert rows == [
        {"prompt": "Rewrite in modern English: And he saith,", "completion": "He said,"},
        {"prompt": "Rewrite in modern English: unto them", "completion": "to God's people"},
    ]
