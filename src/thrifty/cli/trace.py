"""`thrifty trace`: what attention computes, recorded or made up, in one file that all simulated designs read."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL


@click.command()
@click.argument("source", metavar="RUN|MODEL|MASKS.npy|PATTERN")
@click.option("--out", type=click.Path(path_type=Path), default=Path("trace.safetensors"), show_default=True)
@click.option("--examples", type=click.IntRange(1), default=2, show_default=True, help="Examples to record.")
@click.option("--length", type=click.IntRange(2), help="Tokens of an example; the run's own, or 128.")
@click.option("--data", type=click.Path(path_type=Path), help="Text for a model folder, which reads it from there on.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--density", type=float, default=0.1, show_default=True, help="Of a pattern: the share that is kept.")
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Of a pattern; likewise --heads.")
@click.option("--heads", type=click.IntRange(1), default=12, show_default=True)
@click.option("--width", type=click.IntRange(1), default=64, show_default=True, help="Of a head, for masks alone.")
@click.option("--seed", type=int, default=0, show_default=True)
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write the attention of a trained run on its held-out data, of a model folder on the text of --data, or of a
    preset with random values on random tokens. Also ViTCoD's masks from an .npy file, in which True is pruned, and
    masks from a seed: uniform, balanced, runs, diagonal or power-law."""
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.trace(source, out, **options), as_json)
