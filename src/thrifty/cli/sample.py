"""`thrifty sample`: generate text with a trained model."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import CHECKPOINT, OWN_MODEL, SEED


@click.command()
@click.argument("path", metavar="RUN_OR_FOLDER", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to continue. By default a new document.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(min=1), help="New tokens.")
@click.option(
    "--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0), help="0: always the likeliest token."
)
@click.option("--top-k", default=None, type=click.IntRange(min=1), help="Sample from the k most likely tokens.")
@click.option("--seed", default=0, type=SEED, show_default=True, help="The same seed gives the same text.")
@click.option("--chat", is_flag=True, help="Apply the chat template to the prompt, and print only the answer.")
@CHECKPOINT
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(path: Path, as_json: bool, model: str | None, **options: Any) -> None:
    """Continue a prompt with the model of a run (its folder, or its name under runs/) or of a Hugging Face folder."""
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.sample(path, build=model, **options), as_json)
