"""`thrifty chat`: questions and answers with a trained model."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.loaded_model import SEED, load_for_sampling
from thrifty.core.setting_bounds import check_plain

if TYPE_CHECKING:
    import torch
    from torch import nn

    from thrifty.data.chat.chat_template import Message
    from thrifty.data.chat.chat_tokenizer import ChatTokenizer


@click.command()
@click.argument("path", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default=None, help="One question; without it, questions are read line by line.")
@click.option("--system", default=None, help="What the model is told before the conversation begins.")
@click.option(
    "--tokens", default=256, show_default=True, type=click.IntRange(min=1), help="At most this many per answer."
)
@click.option(
    "--temperature", default=0.7, show_default=True, type=click.FloatRange(min=0), help="0 takes the likeliest token."
)
@click.option("--top-k", default=None, type=click.IntRange(min=1), help="Draw among the k likeliest tokens only.")
@click.option("--seed", default=0, type=SEED, show_default=True, help="The same seed gives the same answers.")
@click.option("--template", default="", help="chatml, alpaca or a Jinja file in place of the model's own template.")
@click.option("--json", "as_json", is_flag=True, help="Print the conversation as one JSON document at the end.")
def command(path: Path, prompt: str | None, system: str | None, template: str, as_json: bool, **options: Any) -> None:
    """Talk to the model of a run (its folder, or its name under runs/) or of a Hugging Face folder.

    An empty line ends the conversation, and so does the end of the input.
    """
    from thrifty.cli.verb_output import print_json
    from thrifty.data.chat.chat_tokenizer import read_chat_tokenizer

    model, tokenizer_json, context = load_for_sampling(path)
    tokenizer = read_chat_tokenizer(tokenizer_json, template)
    partner = ChatModel(model, tokenizer, context, **options)
    check_plain(system or "", "--system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for question in _questions() if prompt is None else [prompt]:
        check_plain(question, "the question")
        messages.append({"role": "user", "content": question})
        typist = _Typist(tokenizer)
        show = (lambda chosen: None) if as_json else typist.show
        messages.append({"role": "assistant", "content": partner.answer(messages, show)})
        if not as_json:
            typist.finish()
    if as_json:
        print_json({"path": str(path), "messages": messages})


@dataclass(frozen=True)
class ChatModel:
    """A model to talk to."""

    model: "nn.Module"
    tokenizer: "ChatTokenizer"
    context: int | None
    tokens: int
    temperature: float
    top_k: int | None
    seed: int

    def answer(self, messages: "Sequence[Message]", show: "Callable[[torch.Tensor], None]") -> str:
        """What the model says to the last of the messages."""
        import torch

        from thrifty.models.text_generation import generate

        start = self._prompt(messages)
        device = next(self.model.parameters()).device
        ids = generate(
            self.model,
            torch.tensor([start], device=device),
            self.tokens,
            temperature=self.temperature or 1.0,
            top_k=self.top_k,
            seed=self.seed + len(messages),
            greedy=self.temperature == 0,
            context=self.context,
            stop=self.tokenizer.end_of_turn,
            seen=show,
        )[0, len(start) :].tolist()
        return self.tokenizer.decode(token for token in ids if token != self.tokenizer.end_of_turn)

    def _prompt(self, messages: "Sequence[Message]") -> list[int]:
        """The tokens of the conversation, without its oldest turns where all would leave no room for an answer."""
        opening = [message for message in messages[:1] if message["role"] == "system"]
        turns = list(messages[len(opening) :])
        while True:
            start = self.tokenizer.prompt([*opening, *turns])
            if self.context is None or len(start) + self.tokens <= self.context or len(turns) == 1:
                return start
            del turns[:2]


class _Typist:
    """Shows an answer token by token; a letter of which some bytes are missing waits for them."""

    def __init__(self, tokenizer: "ChatTokenizer"):
        self.tokenizer, self.ids, self.shown = tokenizer, [], 0

    def show(self, chosen: "torch.Tensor") -> None:
        if int(chosen[0]) == self.tokenizer.end_of_turn:
            return
        self.ids.append(int(chosen[0]))
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            click.echo(text[self.shown :], nl=False)
            self.shown = len(text)

    def finish(self) -> None:
        """Print what still waited for bytes, and end the line."""
        click.echo(self.tokenizer.decode(self.ids)[self.shown :])


def _questions() -> Iterator[str]:
    """Lines of the input until an empty one; on a terminal a prompt stands before each."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.rstrip("\n")
