"""`chat`: chat with a trained model."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from thrifty.core.errors import spelled
from thrifty.core.setting_bounds import check_plain
from thrifty.core.user_objects import BuildModel
from thrifty.data.chat.chat_template import Message
from thrifty.data.chat.chat_tokenizer import ChatTokenizer, has_stored_template, read_chat_tokenizer
from thrifty.interface.loaded_model import load_for_sampling, own_model
from thrifty.interface.progress import progress
from thrifty.models.text_generation import generate
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.training.checkpoint_index import CheckpointChoice


@dataclass(repr=False)
class ChatSession(PrintedResult):
    """A conversation with a model."""

    path: str
    model: nn.Module
    tokenizer: ChatTokenizer
    context: int | None
    tokens: int
    temperature: float
    top_k: int | None
    seed: int
    messages: list[Message] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: None
    """Function that receives a notice when older messages no longer fit into the context."""
    dropped: int = 0
    """Number of messages that the last prompt left out."""

    def ask(self, question: str, show: Callable[[str], None] = lambda text: None) -> str:
        """Return the model's answer. `show` is called with each piece of text as it is generated."""
        check_plain(question, "the question")
        self.messages.append({"role": "user", "content": question})
        typist = _Typist(self.tokenizer, show)
        start, count = self._prompt()
        device = next(self.model.parameters()).device
        ids = generate(
            self.model,
            torch.tensor([start], device=device),
            count,
            temperature=self.temperature or 1.0,
            top_k=self.top_k,
            seed=self.seed + len(self.messages),
            greedy=self.temperature == 0,
            context=self.context,
            stop=self.tokenizer.end_of_turn,
            seen=typist.type,
        )[0, len(start) :].tolist()
        typist.finish()
        answer = self.tokenizer.decode(token for token in ids if token != self.tokenizer.end_of_turn)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "messages": self.messages}

    def __rich__(self) -> RenderableType:
        return lines(*(f"{message['role']}: {message['content']}" for message in self.messages))

    def _prompt(self) -> tuple[list[int], int]:
        """Return the tokens of the conversation, and the maximum number of tokens of the answer.

        An answer is shortened to half of the context. If less is left, the oldest turns are dropped.
        """
        opening = [message for message in self.messages[:1] if message["role"] == "system"]
        turns = self.messages[len(opening) :]
        context = self.context or sys.maxsize
        least = max(1, min(self.tokens, context // 2))
        while len(start := self.tokenizer.prompt([*opening, *turns])) + least > context and len(turns) > 1:
            del turns[:2]
        dropped = len(self.messages) - len(opening) - len(turns)
        if dropped > self.dropped:
            self.say(f"the oldest {dropped} messages are left out, because the context has {context:,} tokens")
        self.dropped = dropped
        return start, max(least, min(self.tokens, context - len(start)))


def chat(
    model: Any,
    *,
    system: str = "",
    tokens: int = 256,
    temperature: float = 0.7,
    top_k: int | None = None,
    seed: int = 0,
    template: str = "",
    checkpoint: CheckpointChoice = "last",
    build: nn.Module | BuildModel | str | None = None,
    quiet: bool = False,
) -> ChatSession:
    """Start a conversation with the language model of a run or of a Hugging Face folder.

    Args:
        model: Run, run folder or its name under ./runs, or Hugging Face folder.
        tokens: Maximum number of tokens per answer. An answer is at most half as long as the context, if earlier turns
            need the other half.
        temperature: With 0, the most likely token is chosen. Above 0, tokens are sampled: from all tokens, or from the
            `top_k` most likely tokens if `top_k` is set.
        template: "chatml", "alpaca" or a Jinja file. By default the model's own template is used.
        checkpoint: "best" (best held-out value), "last" or the step of a checkpoint of the run.
        build: Your own model, if the run trained it.
        quiet: True to print no notice if the model was not trained on conversations, or if old turns are left out.

    Raises UsageError if the model is not a next-token model or has no chat template.

    Example::

        conversation = thrifty.chat("runs/mine", template="alpaca")
        print(conversation.ask("Who are you?"))
    """
    check_plain(system, "--system")
    network, tokenizer_json, context = load_for_sampling(model, own_model(model, build), checkpoint)
    tokenizer = read_chat_tokenizer(tokenizer_json, template)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    path = str(getattr(model, "folder", model))
    if not has_stored_template(tokenizer_json):
        progress(quiet)(
            f"{path} has seen no conversation: it continues texts, and its answers may make no sense; to continue a "
            + spelled(f'text: thrifty sample {shlex.quote(path)} --prompt "…"', f'text: thrifty.sample("{path}", "…")')
        )
    return ChatSession(path, network, tokenizer, context, tokens, temperature, top_k, seed, messages, progress(quiet))


class _Typist:
    """Printer of an answer. It prints each token as soon as the token's characters are complete."""

    def __init__(self, tokenizer: ChatTokenizer, show: Callable[[str], None]):
        self.tokenizer, self.show, self.ids, self.shown = tokenizer, show, [], 0

    def type(self, chosen: torch.Tensor) -> None:
        if int(chosen[0]) == self.tokenizer.end_of_turn:
            return
        self.ids.append(int(chosen[0]))
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.show(text[self.shown :])
            self.shown = len(text)

    def finish(self) -> None:
        """Print the bytes of an incomplete character."""
        self.show(self.tokenizer.decode(self.ids)[self.shown :])
