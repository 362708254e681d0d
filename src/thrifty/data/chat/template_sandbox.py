"""Rendering of conversations by a chat template in Jinja's sandbox.

When run as a program, this module serves one parent process under limits of memory and CPU time. It imports only Jinja,
so it starts quickly. If a template exceeds a limit, only this process ends.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2
"""Maximum CPU time for one conversation in seconds."""
MEGABYTES = 512
"""Maximum address space of the process in MB."""
LEAST_TEXT, GROWTH = 1_000_000, 16
"""Maximum number of written characters: LEAST_TEXT, or GROWTH times the length of the conversation if that is more."""
CHECKED_ROLES = ("tool", "developer")
"""Roles that many templates do not support. Templates often omit messages of these roles, or write them in another
role."""
MUST_DIFFER = ("user", "assistant")
"""Roles whose text must differ from the text of a checked role."""


class _Generation(Extension):
    """Tags {% generation %} … {% endgeneration %}. Some templates mark answers with the tags; the text is unchanged."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChangedTurnsError(Exception):
    """Error for a template that writes a turn differently when later turns follow."""


class _Conversation:
    """A compiled template and the messages of a conversation."""

    def __init__(
        self, source: str, words: Mapping[str, str], messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ):
        self.template, self.words, self.messages, self.tools = _compiled(source), words, messages, tools or None

    def render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False, **changes: Any) -> str:
        context = {"messages": messages, "tools": self.tools, "add_generation_prompt": prompt, **self.words, **changes}
        return self.template.render(context)

    def answers(self, whole: str) -> list[tuple[int, int]]:
        """Return the start and end of each answer in the whole text."""
        places = []
        for number, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            before = self.render(self.messages[:number], prompt=True)
            after = self.render(self.messages[: number + 1]) if number + 1 < len(self.messages) else whole
            if not (after.startswith(before) and whole.startswith(after)):
                raise _ChangedTurnsError(
                    "it changes earlier turns when later turns follow, so no single text has every answer after "
                    "its own prompt"
                )
            places.append((len(before), len(after)))
        return places

    def check_roles(self, whole: str, prompt: bool) -> None:
        """Raise ValueError if tools, tool calls, or messages of the roles "tool" and "developer" are not written."""
        if self.tools and self.render(self.messages, prompt, tools=None) == whole:
            raise ValueError("it leaves out the tools that can be called")
        for number, message in enumerate(self.messages):
            role = message["role"]
            if role in CHECKED_ROLES:
                if self._with(number, prompt, content=message["content"] + ".") == whole:
                    raise ValueError(f"it leaves out messages of the role {role!r}")
                for other in MUST_DIFFER:
                    if self._with(number, prompt, role=other) == whole:
                        raise ValueError(f"it writes the role {role!r} as {other!r}")
            if "tool_calls" in message and self._with(number, prompt, tool_calls=None) == whole:
                raise ValueError("it leaves out calls of tools")

    def _with(self, number: int, prompt: bool, **changes: Any) -> str | None:
        changed = {key: value for key, value in {**self.messages[number], **changes}.items() if value is not None}
        try:
            return self.render([*self.messages[:number], changed, *self.messages[number + 1 :]], prompt)
        except (jinja2.TemplateError, TypeError):
            return None


def write_conversation(
    source: str,
    words: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    prompt: bool,
    answers: bool,
) -> dict[str, Any]:
    """Return {"text": the conversation, "answers": [[begin, end], …]}, or {"error": the reason}.

    With `prompt`, the text ends where the next answer starts. Without `answers`, the list is empty. Arguments of calls
    are passed as JSON text to a template that does not accept objects. Reasoning is left out where the template removes
    it when later turns follow.
    """
    try:
        conversation = _Conversation(source, words, messages, tools)
        whole = conversation.render(messages, prompt)
        limit = max(LEAST_TEXT, GROWTH * len(str((messages, tools))))
        if len(whole) > limit:
            raise ValueError(f"it writes {len(whole):,} characters, but at most {limit:,} are allowed")
        if answers:
            conversation.check_roles(whole, prompt)
        return {"text": whole, "answers": conversation.answers(whole) if answers else []}
    except MemoryError:
        return {"error": f"it takes more than {MEGABYTES} MB"}
    except Exception as error:  # a template is a program that may raise anything
        changed = _CHANGES.get(type(error), list)(messages)
        if changed != messages:
            return write_conversation(source, words, changed, tools, prompt, answers)
        return {"error": str(error) or type(error).__name__}


def _with_text_arguments(value: Any) -> Any:
    """Write the arguments of calls in messages as JSON text, as some templates concatenate them."""
    if isinstance(value, Mapping):
        texts = {"arguments": _to_json(value["arguments"])} if isinstance(value.get("arguments"), Mapping) else {}
        return {key: _with_text_arguments(inner) for key, inner in value.items()} | texts
    return [_with_text_arguments(inner) for inner in value] if isinstance(value, list) else value


def _with_less_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out the reasoning before the last question, which many templates omit. If there is none, leave out all."""
    questions = [number for number, message in enumerate(messages) if message["role"] == "user"]
    end = max(questions, default=0)
    if not any("reasoning_content" in message for message in messages[:end]):
        end = len(messages)
    plain = [{key: value for key, value in each.items() if key != "reasoning_content"} for each in messages[:end]]
    return [*plain, *messages[end:]]


_CHANGES = {TypeError: _with_text_arguments, _ChangedTurnsError: _with_less_reasoning}
"""Changes of messages after which a template may accept them, by the error."""


@lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    # chat templates expect that block tags leave no empty lines
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    sandbox.globals["raise_exception"] = _refuse
    sandbox.filters["tojson"] = _to_json
    return sandbox.from_string(source)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as plain text, because Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def serve() -> None:
    """Reply to requests, one per line, until the input ends. The system kills the process at the time limit."""
    with suppress(ValueError, OSError):  # some systems do not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        reply = write_conversation(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
