"""`thrifty train`: from a recipe to a run folder, or from a study to a table of many runs."""

import sys
from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options


@click.command()
@recipe_options
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are kept.")
@click.option("--seeds", type=click.IntRange(min=1), help="Of a study: how many seeds.")
@click.option("--only", multiple=True, metavar="WORD", help="Of a study: only cases with this word in their label.")
@click.option("--jobs", type=click.IntRange(min=1), help="Of a study: how many processes.  [default: one per core]")
@click.option("--keep", type=click.Path(path_type=Path), help="Of a study: keep the result as this .json file too.")
@click.option("--against", type=click.Path(path_type=Path), help="Of a study: compare with this kept result.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def command(
    recipe: str,
    runs: Path,
    seeds: int | None,
    only: tuple[str, ...],
    jobs: int | None,
    keep: Path | None,
    against: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train by RECIPE: the name of a recipe (`thrifty list recipes`) or a TOML file. Default: text.

    The run is kept in runs/NAME; a name that exists is refused, never overwritten.

    A study (`thrifty list studies`) makes many small runs and ends with a table, plots, and whether what was expected
    holds. Stopped and started again, it goes on where it was; --set changes a setting of the study. With --against,
    the exit code is 1 if a number is outside the kept interval.
    """
    from thrifty.experiments import studies

    of_study = {"seeds": seeds, "only": only, "jobs": jobs, "keep": keep, "against": against}
    if recipe in studies.names():
        _refuse(recipe, "study", options, but=("name", "assignments"))
        study = studies.make(recipe, options["assignments"])
        sys.exit(_study(study, runs / (options["name"] or recipe), quiet=quiet, as_json=as_json, **of_study))
    _refuse(recipe, "recipe", of_study)
    _run(runs, quiet, as_json, recipe=recipe, **options)


def _run(runs: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    from thrifty.cli.verb_output import print_summary
    from thrifty.training.trainer import train

    layers = build_recipe(**options)
    summary = train(layers.recipe(), runs, origins=layers.changed(), quiet=quiet)
    print_summary(summary, as_json, quiet)
    sys.exit(summary["exit_code"])


def _refuse(name: str, kind: str, options: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Raises UsageError for an option that means nothing here; one that was silently ignored would mislead."""
    from thrifty.core.errors import UsageError

    spelled = {"additions": "with", "removals": "without"}
    for option, value in options.items():
        if option not in but and value not in (None, ()):
            raise UsageError(f"{name} is a {kind}, which has no --{spelled.get(option, option)}", fix="leave it out")


def _study(
    study: Any,
    folder: Path,
    seeds: int | None,
    only: tuple[str, ...],
    jobs: int | None,
    keep: Path | None,
    against: Path | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Measure a study, tell its outcome, keep and compare it as asked; the exit code."""
    from dataclasses import replace

    from thrifty.cli.verb_output import print_json
    from thrifty.core.errors import UsageError
    from thrifty.experiments import saved_study
    from thrifty.experiments.study_result import read_result
    from thrifty.experiments.study_runner import is_measured, read_folder, run_study
    from thrifty.experiments.study_table import table

    study = replace(study, seeds=seeds) if seeds else study
    if keep and only:
        raise UsageError("--keep keeps a whole study, --only measures a part of one", fix="leave one of them out")
    if keep:
        saved_study.refuse_existing_study(keep)
    kept = read_result(against) if against else None
    result = read_folder(study, folder)
    # what has been measured is not measured again, but may still be kept or compared
    if result is None or not is_measured(result, only) or not (keep or against):
        result = run_study(study, folder, only=only, jobs=jobs, say=(lambda text: None) if quiet else _say)
    if as_json:
        print_json(result.as_data())
    elif not quiet:
        click.echo(f"{table(result)}\n{folder / 'report.html'}")
    if keep:
        saved_study.save_study(result, keep)
    if kept is None:
        return 0
    comparison = saved_study.compare_with_saved(result, kept)
    for line in comparison.off:
        click.echo(f"off: {line}", err=True)
    _say(f"{comparison.compared - len(comparison.off)} of {comparison.compared} numbers agree with {against}")
    return 1 if comparison.off else 0


def _say(text: str) -> None:
    click.echo(text, err=True)
