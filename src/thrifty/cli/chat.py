"""`thrifty chat`: chat with a trained model."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import CHECKPOINT, OWN_MODEL, SEED


@click.command()
@click.argument("path", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default=None, help="One question. By default questions are read line by line.")
@click.option("--system", default="", help="System message at the start of the conversation.")
@click.option("--tokens", default=256, show_default=True, type=click.IntRange(min=1), help="Maximum number of tokens.")
@click.option(
    "--temperature", default=0.7, show_default=True, type=click.FloatRange(min=0), help="0: always the likeliest token."
)
@click.option("--top-k", default=None, type=click.IntRange(min=1), help="Sample from the k most likely tokens.")
@click.option("--seed", default=0, type=SEED, show_default=True, help="The same seed gives the same answers.")
@click.option("--template", default="", help="Instead of the model's template: chatml, alpaca or a Jinja file.")
@CHECKPOINT
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print the conversation as one JSON document at the end.")
def command(path: Path, prompt: str | None, as_json: bool, model: str | None, **options: Any) -> None:
    """Chat with the model of a run (its folder, or its name under runs/) or of a Hugging Face folder.

    An empty line or the end of the input ends the conversation.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result
    from thrifty.reporting.printed_result import visible

    def show(text: str) -> None:
        if not as_json:
            click.echo(visible(text), nl=False)

    conversation = thrifty.chat(path, build=model, **options)
    for question in _questions() if prompt is None else [prompt]:
        conversation.ask(question, show)
        if not as_json:
            click.echo()
    if as_json:
        print_result(conversation, as_json)


def _questions() -> Iterator[str]:
    """Yield input lines until an empty line or the end of the input. On a terminal, print "> " before each line."""
    while sys.stdin is not None:
        if sys.stdin.isatty():
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield line.rstrip("\n")
