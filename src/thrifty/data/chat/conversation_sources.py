"""Sources of conversations in the usual formats of instruction data.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}      any number of turns;
                        "content" may also be a list of texts, [{"type": "text", "text": "…"}]. An answer may have
                        "tool_calls"; messages of the role "tool" then contain the results. The optional key "tools"
                        lists the tools that can be called. An answer with "weight": 0 has no loss
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}          ShareGPT;
                        "function_call" is an answer that calls a tool; "observation" is the result
    {"instruction": "…", "input": "…", "output": "…"}                                            Alpaca; input optional;
                        "history" lists earlier questions and answers, [["…", "…"]], or messages. Other forms of
                        it have no effect
    {"prompt": "…", "completion": "…"}

Each row of a table is a conversation (`data/text/row_tables.py`). The optional key "system" of a row is its first
message, unless the row has such a message. In a .csv or .tsv file, "messages" is JSON.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.data.catalogue import PYTHON_FUNCTIONS, entries
from thrifty.data.chat.chat_template import Message
from thrifty.data.text.document_sources import BINARY_TABLES, FetchedSet, FileSource, refuse_compressed
from thrifty.data.text.python_sources import described_functions, python_files
from thrifty.data.text.row_tables import Row, first_row, is_table, open_table, table_files
from thrifty.data.text.text_readers import check_characters

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
}
"""Role of each speaker name."""
SYSTEM = ("system", "system_prompt")
"""Keys of a row whose text becomes the first message. Values of other types have no effect."""
ALSO_PASSED = ("name", "tool_call_id", "reasoning_content")
"""Other keys of a message that chat templates read. Numbers become text; values of other types are not passed on."""
PADDED = ("tools", "tool_calls")
"""Keys whose values contain objects of different keys."""
FORMS = '"messages", "conversations", "instruction" and "output", or "prompt" and "completion"'


class Conversation(NamedTuple):
    """Messages, the tools that can be called, and the position of the row for error messages."""

    where: str
    messages: list[Message]
    tools: list[Any]


class ConversationSource(Protocol):
    """A source of conversations."""

    def rows(self) -> Iterator[Row]:
        """Yield each conversation in a format of the module docstring, with its position. The order never changes."""

    def identity(self) -> str:
        """Return a hash that changes when the rows may have changed."""


def conversations(source: ConversationSource) -> Iterator[Conversation]:
    """Yield the messages of each row up to the last answer with a loss. Skip rows without such an answer.

    Raises UsageError with the line number for a row in another format.
    """
    for where, row in source.rows():
        messages = read_messages(row, where)
        answers = [index for index, each in enumerate(messages) if each["role"] == "assistant" and _is_learned(each)]
        if answers:
            yield Conversation(where, messages[: answers[-1] + 1], _read_tools(row, where))


def _is_learned(answer: Message) -> bool:
    return answer.get("weight") != 0 and bool(answer["content"].strip() or answer.get("tool_calls"))


def read_messages(row: Mapping[str, Any], where: str) -> list[Message]:
    """Convert a row in any format of the module docstring to messages."""
    messages = _turns(row, where)
    is_opened = bool(messages) and messages[0]["role"] in ("system", "developer")
    key = next((key for key in SYSTEM if row.get(key) and isinstance(row[key], str)), None)
    return messages if is_opened or not key else [{"role": "system", "content": _text(row, key, where)}, *messages]


def _turns(row: Mapping[str, Any], where: str) -> list[Message]:
    if "messages" in row or "conversations" in row:
        form = "messages" if "messages" in row else "conversations"
        turns = _parsed(row[form], f"{where}: {form!r}") if str(row[form]).startswith("[") else row[form]
        if not isinstance(turns, list):
            raise UsageError(f"{where}: {form!r} holds {type(turns).__name__}, not a list", fix="write a list of turns")
        return [_turn(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, start=1)]
    if "instruction" in row and "output" in row:
        question = _alpaca_question(_text(row, "instruction", where), _text(row, "input", where))
        answer = {"role": "assistant", "content": _text(row, "output", where)}
        return [*_alpaca_history(row, where), question, answer]
    if "prompt" in row and "completion" in row:
        sides = (("user", "prompt"), ("assistant", "completion"))
        return [{"role": role, "content": _text(row, key, where)} for role, key in sides]
    raise UsageError(
        f"{where}: no conversation, but the keys {', '.join(row) or '(none)'}", fix=f"write rows with {FORMS}"
    )


def _turn(turn: Any, where: str) -> Message:
    keys = ("role", "content") if isinstance(turn, Mapping) and "role" in turn else ("from", "value")
    if not isinstance(turn, Mapping) or keys[0] not in turn or not (keys[1] in turn or turn.get("tool_calls")):
        raise UsageError(f"{where}: not a message", fix='write {"role": "user", "content": "..."}')
    speaker = turn[keys[0]]
    if not isinstance(speaker, str) or speaker not in ROLES:
        raise UsageError(f"{where}: unknown role {speaker!r}", fix=did_you_mean(str(speaker), ROLES))
    message: dict[str, Any] = {"role": ROLES[speaker], "content": ""}
    passed = {key: str(value) for key in ALSO_PASSED if isinstance(value := turn.get(key), str | int)}
    message |= {key: text for key in passed if (text := _text(passed, key, where))}
    if speaker == "function_call":
        message["tool_calls"] = _named_calls(turn.get(keys[1]), where)
    else:
        message["content"] = _text({keys[1]: _joined(turn.get(keys[1]))}, keys[1], where)
    if message["role"] != "assistant":
        return message
    if turn.get("tool_calls"):
        message["tool_calls"] = _read_calls(turn["tool_calls"], f"{where}: 'tool_calls'")
    if (weight := turn.get("weight")) not in (None, 0, 1):
        fix = 'write "weight": 0 for an answer without a loss; leave it out for others, which all have the same weight'
        raise UsageError(f"{where}: 'weight' is {weight!r:.60}, not 0 or 1", fix=fix)
    return message if weight in (None, 1) else {**message, "weight": 0}


def _read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools in a message. The value is a list, or its JSON."""
    calls = _parsed(value or [], where)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        fix = 'write [{"type": "function", "function": {"name": "...", "arguments": {...}}}]'
        raise UsageError(f"{where} holds {value!r:.60}, not a list of calls", fix=fix)
    return [_decoded_call(call, where) for call in calls]


def _named_calls(content: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a ShareGPT turn. The JSON is {"name": "…", "arguments": {…}}, or a list."""
    calls = _parsed(content, where)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise UsageError(f"{where}: not a call of a tool", fix='write the value {"name": "...", "arguments": {...}}')
    return [{"type": "function", "function": _decoded_call(call, where)} for call in calls]


def _decoded_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Decode arguments that are the JSON of an object, because a template would quote the text again."""
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _decoded_call(function, where)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments.strip() or "{}")
    if not isinstance(arguments, dict):
        return dict(call)
    check_characters(json.dumps(arguments, ensure_ascii=False), where)
    return {**call, "arguments": arguments}


def _without_padding(value: Any, inside: bool = False) -> Any:
    """Leave out keys without a value inside tools and their calls. Arrow adds all keys of all rows to each row."""
    if isinstance(value, Mapping):
        kept = {key: inner for key, inner in value.items() if not inside or inner is not None}
        return {key: _without_padding(inner, inside or key in PADDED) for key, inner in kept.items()}
    return [_without_padding(inner, inside) for inner in value] if isinstance(value, list) else value


def _read_tools(row: Mapping[str, Any], where: str) -> list[Any]:
    tools = _parsed(row.get("tools") or [], f"{where}: 'tools'")
    if not isinstance(tools, list):
        raise UsageError(f"{where}: 'tools' holds {type(tools).__name__}, not a list", fix="write a list of tools")
    return tools


def _parsed(value: Any, where: str) -> Any:
    """Return a JSON value; if it is encoded as text, decode it."""
    if not isinstance(value, str):
        check_characters(json.dumps(value, ensure_ascii=False), where)
        return value
    try:
        return _parsed(json.loads(value or "[]"), where)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON ({error})", fix="write it as JSON") from None


def _joined(content: Any) -> Any:
    """Join the parts of a turn to one text if all parts are texts: [{"type": "text", "text": "…"}]."""
    parts = content if isinstance(content, list) else []
    texts = [each["text"] for each in parts if isinstance(each, Mapping) and isinstance(each.get("text"), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else content


def _alpaca_question(instruction: str, context: str) -> Message:
    """Return the question of an Alpaca row, also with the keys instruction and input for templates that use them."""
    if not context.strip():
        return {"role": "user", "content": instruction}
    return {"role": "user", "content": f"{instruction}\n\n{context}", "instruction": instruction, "input": context}


def _alpaca_history(row: Mapping[str, Any], where: str) -> list[Message]:
    """Return the turns before the question of an Alpaca row: [["question", "answer"], …], or messages."""
    history = row.get("history")
    if isinstance(history, str):
        with suppress(ValueError, RecursionError):
            history = json.loads(history)
    turns: list[Any] = []
    for each in history if isinstance(history, list) else ():
        if isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each):
            turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), each, strict=True)]
        elif isinstance(each, Mapping) and ("role" in each or "from" in each):
            turns.append(each)
        else:
            return []
    return [_turn(turn, f"{where}, turn {number} of 'history'") for number, turn in enumerate(turns, start=1)]


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    text = row.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UsageError(f"{where}: {key!r} holds {type(text).__name__}, not text", fix=f"write {key!r} as text")
    check_characters(text, f"{where}: {key!r}")
    return text


@dataclass(frozen=True)
class ConversationTable:
    """The rows of one or several files."""

    files: tuple[Path, ...]

    def rows(self) -> Iterator[Row]:
        for file in self.files:
            is_padded = file.suffix.lower() in BINARY_TABLES
            for where, row in open_table(file).rows:
                yield where, _without_padding(row) if is_padded else row

    def identity(self) -> str:
        return FileSource(self.files).identity()


@dataclass(frozen=True)
class PythonFunctions:
    """Python functions of the standard library and torch. The docstring is the question; the source is the answer."""

    def rows(self) -> Iterator[Row]:
        for path in python_files():
            for number, (question, answer) in enumerate(described_functions(path), start=1):
                yield f"{path}, function {number}", {"prompt": question, "completion": answer}

    def identity(self) -> str:
        return "functions " + FileSource(python_files()).identity()


def open_conversations(source: str) -> ConversationSource:
    """Return the source for a name: a known data set of conversations, otherwise a table or a folder of tables.

    Raises UsageError for any other name.
    """
    known = entries().get(source)
    if known is not None and known.kind != "chats":
        raise UsageError(
            f"{source!r} is of kind {known.kind!r}, not a set of conversations",
            fix=f"choose one of {', '.join(name for name, entry in entries().items() if entry.kind == 'chats')}",
        )
    if source == PYTHON_FUNCTIONS:
        return PythonFunctions()
    if known is not None:
        if not known.present:
            raise UsageError(f"the set {source!r} is not on this machine yet", fix=f"thrifty data get {source}")
        return FetchedSet(known)
    path = Path(source).expanduser()
    refuse_compressed(path)
    files = table_files(path)
    if path.is_dir() and not files:
        files = tuple(file for file in sorted(path.iterdir()) if is_table(file))
    if not files or not path.exists():
        what = "is not a table or a folder of tables" if path.exists() else "is neither a file nor a known set"
        raise UsageError(f"{source!r} {what} of conversations", fix=f"set data.source to a table of rows with {FORMS}")
    return ConversationTable(files)


def holds_conversations(source: str) -> bool:
    """Return True for a known set of conversations, and a table that begins with one in a known format."""
    if source in entries():
        return entries()[source].kind == "chats"
    row = first_row(Path(source).expanduser())
    try:
        return bool(row) and bool(read_messages(row, source))
    except UsageError:
        return False
