"""`thrifty export`: write a trained model as a Hugging Face folder, or its adapter as a PEFT folder."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import CHECKPOINT, OWN_MODEL


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@CHECKPOINT
@click.option(
    "--raw-weights", is_flag=True, help="Export the trained weights, even if the run evaluated averaged weights."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option(
    "--part",
    type=click.Choice(["adapter", "base", "masks"]),
    help="Part to export: the adapter in PEFT format, its base model, or the masks of a sparse run as a file.",
)
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, folder: Path, as_json: bool, **options: Any) -> None:
    """Write the model of RUN to FOLDER: config.json, safetensors, and the tokenizer or image preprocessor.

    Adapters and gains are merged into the weights. --part exports only the adapter, the base model or the masks.
    README.md is a model card from the records of the run. FOLDER must be empty or absent.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.export(run, folder, **options), as_json)
