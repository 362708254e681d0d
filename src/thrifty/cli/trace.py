"""`thrifty trace`: record or generate an attention trace, the input of simulated accelerators."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL


@click.command()
@click.argument("source", metavar="RUN|MODEL|MASKS.npy|PATTERN")
@click.option("--out", type=click.Path(path_type=Path), default=Path("trace.safetensors"), show_default=True)
@click.option("--examples", type=click.IntRange(1), default=2, show_default=True, help="Number of examples.")
@click.option("--length", type=click.IntRange(2), help="Tokens per example.  [default: the run's, or 128]")
@click.option("--data", type=click.Path(path_type=Path), help="Text on which a model folder is traced.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--density", type=float, default=0.1, show_default=True, help="Fraction of pairs kept by a pattern.")
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Layers of a pattern.")
@click.option("--heads", type=click.IntRange(1), default=12, show_default=True, help="Heads of a pattern.")
@click.option(
    "--width", type=click.IntRange(1), default=64, show_default=True, help="Width of a head, for masks and patterns."
)
@click.option("--seed", type=int, default=0, show_default=True)
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(source: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write an attention trace to --out. SOURCE is a run (traced on its held-out data), a model folder (traced on the
    text of --data) or a preset (random weights and tokens).

    SOURCE can also be masks without values: a .npy file of ViTCoD, in which True is pruned, or a random pattern:
    uniform, balanced, runs, diagonal or power-law.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.trace(source, out, **options), as_json)
