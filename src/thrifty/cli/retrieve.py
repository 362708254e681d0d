"""`thrifty retrieve`: measure image-caption retrieval and zero-shot classification."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import CHECKPOINT, OWN_MODEL


@click.command("retrieve")
@click.argument("run", type=click.Path(path_type=Path))
@CHECKPOINT
@click.option(
    "--raw-weights", is_flag=True, help="Use the trained weights, even if the run evaluated averaged weights."
)
@click.option(
    "--classes",
    default="",
    metavar="SOURCE",
    help="Also classify these images zero-shot, by the names of their labels.",
)
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT",
    help='Caption of a class; {} is its label. Repeatable: captions are averaged.  [default: "{}"]',
)  # fmt: skip
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool, **options: Any) -> None:
    """Measure R@1, R@5 and R@10 of RUN in both directions, on all held-out images and captions of its data.

    RUN is a run folder, or a name under ./runs. Its objective must be contrastive.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.retrieve(run, **options), as_json)
