"""`thrifty retrieve`: how well a model finds captions by images and images by captions, and classes by their names."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL


@click.command("retrieve")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="The checkpoint of this step instead of the newest.")
@click.option("--raw-weights", is_flag=True, help="The weights in training where the run judged an average of them.")
@click.option("--classes", default="", metavar="SOURCE", help="Also tell apart the labels of these images by name.")
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT",
    help='What a class is called, {} standing for its label; several are averaged.  [default: "{}"]',
)  # fmt: skip
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool, **options: Any) -> None:
    """Measure the model of RUN on all held-out images and captions of its data: R@1, R@5 and R@10 both ways.

    RUN is a run folder, or the name of one under ./runs, whose objective was contrastive.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.retrieve(run, **options), as_json)
