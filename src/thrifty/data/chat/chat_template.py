"""How a conversation is written down as text: a chat template in Jinja, such as tokenizers bring along.

A template comes with a model and is a program, so it runs in a sandbox: it sees the messages and the spelling of a few
special tokens, and nothing else, not even the date.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from thrifty.core.errors import UsageError

Message = Mapping[str, str]
"""{"role": "system", "user" or "assistant", "content": text}."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The format of ChatML: every turn between two special tokens, its role on a line of its own."""

ALPACA = (
    "{% set intro = 'Below is an instruction that describes a task' %}"
    "{% set request = 'Write a response that appropriately completes the request.\\n\\n' %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{% if loop.first and message['input'] %}"
    "{{ intro + ', paired with an input that provides further context. ' + request }}"
    "{% elif loop.first %}{{ intro + '. ' + request }}{% endif %}"
    "{% if message['input'] %}"
    "{{ '### Instruction:\\n' + message['instruction'] + '\\n\\n### Input:\\n' + message['input'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""The prompts of Stanford Alpaca, for models that know no turns: plain headings, and an end of text after each answer.
Needs no special token but that one."""

NAMED = {"chatml": CHATML, "alpaca": ALPACA}


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}, by which some templates mark answers: what is inside, as it is."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(reason: str) -> NoReturn:
    raise jinja2.TemplateError(reason)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As plain text: Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    words: Mapping[str, str] = field(default_factory=dict)
    """How special tokens are spelled, by the part they play: eos_token, bos_token, …"""

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The conversation as text; with `prompt` up to where the next answer begins.

        Raises UsageError where the template is none, or does not accept these messages.
        """
        try:
            return self._compiled.render(messages=messages, add_generation_prompt=prompt, **self.words)
        except Exception as error:  # a template is a program, which can fail in any way
            raise UsageError(
                f"the chat template does not accept these messages: {error}",
                fix="let user and assistant take turns, or choose another objective.template, such as chatml",
            ) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        # what tokenizers expect of their surroundings: a block leaves no line of its own
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        sandbox.globals["raise_exception"] = _refuse
        sandbox.filters["tojson"] = _to_json
        return sandbox.from_string(self.source)
