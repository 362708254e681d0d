"""Chat templates in Jinja, as distributed with tokenizers. A template renders a conversation as text.

A template is third-party code, so it runs in a sandbox. It can read only the messages, the tools and the spelling of a
few special tokens. Templates that are not built in run in a separate process with limits of time and memory.
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
"""{"role": role, "content": text}. The role is "system", "developer", "user", "assistant" or "tool"; a message of the
assistant may have "tool_calls"."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML: two special tokens enclose every turn. The first line of a turn is the role."""

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
"""Prompts of Stanford Alpaca, with plain headings, for models without special tokens for turns.

An end-of-text token follows each answer. No other special token is required.
"""

NAMED = {"chatml": CHATML, "alpaca": ALPACA}


@dataclass(frozen=True)
class WrittenConversation:
    """The text of a conversation with the positions of its answers."""

    text: str
    answers: list[tuple[int, int]]
    """Start and end of each answer in the text."""


class TemplateLimitError(UsageError):
    """Error for a chat template that exceeds its limit of time or memory. Other conversations would probably exceed the
    limit too."""


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja source of a chat template, and the spelling of special tokens."""

    source: str
    words: Mapping[str, str] = field(default_factory=dict)
    """Spelling of special tokens by their role: eos_token, bos_token, …"""

    def write(
        self, messages: Sequence[Message], prompt: bool = False, tools: Sequence[Any] = ()
    ) -> WrittenConversation:
        """Return the text of a conversation and its answers. With `prompt`, the text ends where the next answer starts.

        `tools` are the tools that the conversation can call. Raises UsageError if the template is invalid or rejects
        the messages. A template must write the tools, and must write messages of the roles "tool" and "developer" in
        these roles. Later turns must not change the text of earlier turns.
        """
        return self._write(messages, prompt, tools, answers=True)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Return the text of messages. Raises UsageError if the template is invalid or rejects the messages."""
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
                fix="change the messages; or set objective.template to one that accepts them: chatml, alpaca or a file",
            )
        return WrittenConversation(**reply)


class _SandboxProcess:
    """The process that runs templates. It starts at the first conversation, and again after a limit was exceeded."""

    def __init__(self):
        self.lock, self.process, self.owner = Lock(), None, 0

    def write_conversation(self, **request: Any) -> dict[str, Any]:
        """Return the result of `template_sandbox.write_conversation`. Raises TemplateLimitError above a limit."""
        with self.lock:
            process = self._running()
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:  # the next request must not read this reply
                process.kill()
                self.close()
                raise
            if not reply.endswith(b"\n"):
                is_late = self.close() == -signal.SIGPROF
                limit = f"{template_sandbox.SECONDS} s" if is_late else f"{template_sandbox.MEGABYTES} MB"
                raise TemplateLimitError(
                    f"the chat template takes more than {limit} for one conversation",
                    fix="set objective.template to another template, such as chatml",
                )
        return json.loads(reply)

    def _running(self) -> subprocess.Popen:
        if self.process is None or self.owner != os.getpid():  # a forked process must not use the child of its parent
            self.owner = os.getpid()
            self.process = subprocess.Popen(
                [sys.executable, template_sandbox.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,  # an interrupt of the parent must not stop the child
            )
        return self.process

    def close(self) -> int | None:
        """End the process and return its exit status."""
        process, self.process = self.process, None
        if process is None or self.owner != os.getpid():
            return None
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return process.wait()


_SANDBOX = _SandboxProcess()
atexit.register(_SANDBOX.close)
