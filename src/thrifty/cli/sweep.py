"""`thrifty sweep`: search over settings of a recipe by successive halving."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import announce, build_recipe, recipe_options, run_options
from thrifty.core.errors import UsageError


@click.command()
@recipe_options
@run_options
@click.option("--over", multiple=True, metavar="PATH=VALUES", help="Setting to vary: 8,16,32 or 1e-4..1e-2:log.")
@click.option("--trials", type=int, help="Number of trials.  [default: the grid, or 9 if a setting has a range]")
@click.option("--reduction", type=int, default=3, show_default=True, help="1/REDUCTION of the trials continue.")
@click.option("--rungs", type=int, help="Number of rungs; 1 trains all to the end.  [default: until 1 trial is left]")
@click.option(
    "--worker",
    "workers",
    metavar="COMMAND",
    multiple=True,
    help="Machine for runs, as in thrifty compare: here, or a command.  [default: here]",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Parent folder.  [default: runs]")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON at the end.")
def command(
    name: str | None,
    over: tuple[str, ...],
    trials: int | None,
    reduction: int,
    rungs: int | None,
    workers: tuple[str, ...],
    runs: Path,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Search over settings of RECIPE by successive halving:

    \b
        thrifty sweep text --over adamw.lr=1e-4..1e-2:log --over data.batch=8,16,32

    All trials train for a fraction of the budget, and the best third resumes, until one trial has the whole budget.
    VALUES are a list, or a range LOW..HIGH, on a logarithmic scale with :log. --seed also seeds the search. The same
    command resumes an interrupted sweep.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    result = thrifty.sweep(
        announce(build_recipe(**options), quiet).recipe(),
        _read_over(over),
        name=name,
        trials=trials,
        reduction=reduction,
        rungs=rungs,
        workers=workers,
        runs=runs,
        quiet=quiet,
    )
    print_result(result, as_json, quiet)


def _read_over(words: tuple[str, ...]) -> dict[str, str]:
    """Return the values of --over by path. Raise UsageError if a word is not PATH=VALUES."""
    split = [word.partition("=") for word in words]
    for word, (path, equals, _) in zip(words, split, strict=True):
        if not path or not equals:
            raise UsageError(f"--over {word!r} is not PATH=VALUES", fix="--over data.batch=8,16,32")
    return {path.strip(): values for path, _, values in split}
