"""`thrifty export`: a trained model as a Hugging Face folder, or its adapter as a folder of PEFT."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="The checkpoint of this step instead of the newest.")
@click.option("--raw-weights", is_flag=True, help="The weights in training, where the run judged an average of them.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option(
    "--part",
    type=click.Choice(["adapter", "base", "masks"]),
    help="The adapter alone, in PEFT's layout; the model that it was trained on; a sparse run's masks as a file.",
)
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, folder: Path, as_json: bool, **options: Any) -> None:
    """Write the model of RUN to FOLDER: config.json, safetensors, and the tokenizer or what images must go through.
    Adapters are merged, gains folded in; with --part the adapter and the base can be had apart.

    FOLDER must not exist or be empty: nothing is overwritten.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.export(run, folder, **options), as_json)
