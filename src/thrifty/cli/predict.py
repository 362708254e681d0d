"""`thrifty predict`: labels of new texts or images, by the trained model of a run."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import CHECKPOINT, OWN_MODEL
from thrifty.core.errors import UsageError


@click.command("predict")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("examples", nargs=-1)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    help="Table of texts, text file with one text per line, image, or folder of images, in place of EXAMPLES.",
)
@click.option("--column", default="", help="Column of texts in a table.  [default: as in training]")
@click.option("--pair-column", default="", help="Column of the second texts of pairs.")
@CHECKPOINT
@OWN_MODEL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with the probability of each class.")
def command(run: Path, examples: tuple[str, ...], file: Path | None, as_json: bool, **options: Any) -> None:
    """Predict the label of each of EXAMPLES, which are texts or paths of images.

    RUN is a run folder, or a name under ./runs. It was trained on labelled texts or images.
    """
    if bool(examples) == bool(file):
        raise UsageError("pass examples or a file", fix=f'thrifty predict {run} "a text"; or --file texts.csv')
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.predict(run, file or list(examples), **options), as_json)
