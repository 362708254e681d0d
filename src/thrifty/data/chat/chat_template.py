"""Chat templates in Jinja, such as tokenizers bring along, by which a conversation becomes text.

A template comes with a model and is a program, so it runs in a sandbox: it sees the messages and the spelling of a few
special tokens, and nothing else, not even the date. One that is not ours runs in a process of its own, whose time and
memory are limited.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from thrifty.core.child_python import child_environment
from thrifty.core.errors import UsageError
from thrifty.data.chat import template_sandbox

Message = Mapping[str, Any]
"""{"role": "system", "developer", "user", "assistant" or "tool", "content": text}; an answer may have "tool_calls"."""

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
    "{% if message['role'] in ['system', 'developer'] %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}"
    "{% if loop.first and message['input'] %}"
    "{{ intro + ', paired with an input that provides further context. ' + request }}"
    "{% elif loop.first %}{{ intro + '. ' + request }}{% endif %}"
    "{% if message['input'] %}"
    "{{ '### Instruction:\\n' + message['instruction'] + '\\n\\n### Input:\\n' + message['input'] + '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}"
    "{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""The prompts of Stanford Alpaca, for models that know no turns: plain headings, and an end of text after each answer.
Needs no special token but that one."""

NAMED = {"chatml": CHATML, "alpaca": ALPACA}


@dataclass(frozen=True)
class WrittenConversation:
    text: str
    answers: list[tuple[int, int]]
    """The first and last place of each answer in the text."""


class TemplateLimitError(UsageError):
    """A chat template used up its time or memory, as it would for other conversations too."""


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    words: Mapping[str, str] = field(default_factory=dict)
    """How special tokens are spelled, by the part they play: eos_token, bos_token, …"""

    def write(
        self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Any] = ()
    ) -> WrittenConversation:
        """The conversation as text with its answers; with `prompt` up to where the next answer begins. `tools` are
        those that it may call.

        Raises UsageError where the template is none, or does not accept these messages: also one that leaves the tools,
        or a tool's or developer's message out, writes it as another role's, or writes earlier turns anew in later ones.
        """
        return self._write(messages, prompt, tools, answers=True)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The text that the template makes of messages. Raises UsageError where it is none or refuses them."""
        return self._write(messages, prompt, (), answers=False).text

    def _write(
        self, messages: Sequence[Message], prompt: bool, tools: Sequence[Any], answers: bool
    ) -> WrittenConversation:
        write = template_sandbox.write_conversation if self.source in NAMED.values() else _SANDBOX.write_conversation
        reply = write(
            source=self.source,
            words=dict(self.words),
            messages=list(messages),
            tools=list(tools),
            prompt=prompt,
            answers=answers,
        )
        if "error" in reply:
            raise UsageError(
                f"the chat template does not accept these messages: {reply['error']}",
                fix="let user and assistant take turns, or choose another objective.template, such as chatml",
            )
        return WrittenConversation(**reply)


class _SandboxProcess:
    """The process that runs templates for this one; it is started when it is first needed, and again after a limit."""

    def __init__(self):
        self.lock, self.process, self.owner = Lock(), None, 0

    def write_conversation(self, **request: Any) -> dict[str, Any]:
        """Do as `template_sandbox.write_conversation`. Raises TemplateLimitError."""
        with self.lock:
            process = self._running()
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # whoever asks next must not read this answer
                process.kill()
                self.close()
                raise
            if not reply.endswith(b"\n"):
                is_late = self.close() == -signal.SIGPROF
                limit = f"{template_sandbox.SECONDS} s" if is_late else f"{template_sandbox.MEGABYTES} MB"
                raise TemplateLimitError(
                    f"the chat template takes more than {limit} for one conversation",
                    fix="choose another objective.template, such as chatml",
                )
        return json.loads(reply)

    def _running(self) -> subprocess.Popen:
        if self.process is None or self.owner != os.getpid():  # a fork shares the process of its parent
            self.owner = os.getpid()
            self.process = subprocess.Popen(
                [sys.executable, template_sandbox.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # an interrupt of this process is not meant for it
            )
        return self.process

    def close(self) -> int | None:
        """End the process; return its exit status."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


_SANDBOX = _SandboxProcess()
atexit.register(_SANDBOX.close)
