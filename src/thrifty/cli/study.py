"""`thrifty study NAME`: many small runs, a table of them, and whether what was expected holds."""

import sys
from pathlib import Path

import click


@click.command("study")
@click.argument("study", metavar="NAME")
@click.option("--name", "folder_name", help="Name of its folder under runs/.  [default: NAME]")
@click.option("--set", "assignments", multiple=True, metavar="SETTING=VALUE", help="Change a setting of the study.")
@click.option("--seeds", type=click.IntRange(min=1), help="How many seeds.")
@click.option("--cases", multiple=True, metavar="WORD", help="Measure only cases with this word in their label.")
@click.option("--jobs", type=click.IntRange(min=1), help="How many processes.  [default: one per core]")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where its folder is kept.")
@click.option("--save-result", type=click.Path(path_type=Path), help="Write the result as this .json file too.")
@click.option("--baseline-result", type=click.Path(path_type=Path), help="Compare with this saved result.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON at the end.")
def command(
    study: str,
    folder_name: str | None,
    assignments: tuple[str, ...],
    seeds: int | None,
    cases: tuple[str, ...],
    jobs: int | None,
    runs: Path,
    save_result: Path | None,
    baseline_result: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure the study NAME (`thrifty list studies`): many small runs, a table, plots, and whether what was expected
    holds.

    An interrupted study resumes where it stopped. With --baseline-result the exit code is 1 if a number is outside the
    interval of the saved result.
    """
    from dataclasses import replace

    from thrifty.cli.verb_output import print_result, progress
    from thrifty.core.errors import UsageError
    from thrifty.core.file_names import check_name
    from thrifty.experiments import saved_study, studies
    from thrifty.experiments.study_result import read_result
    from thrifty.experiments.study_runner import is_measured, read_folder, run_study
    from thrifty.experiments.study_table import table

    made = studies.make(study, assignments)
    made = replace(made, seeds=seeds) if seeds else made
    if save_result and cases:
        raise UsageError(
            "--save-result writes a whole study, --cases measures a part of one", fix="leave one of them out"
        )
    if save_result:
        saved_study.refuse_existing_study(save_result)
    baseline = read_result(baseline_result) if baseline_result else None
    folder = runs / check_name(folder_name or study, "--name")
    result = read_folder(made, folder)
    # what has been measured is not measured again, but may still be saved or compared
    if result is None or not is_measured(result, cases) or not (save_result or baseline):
        result = run_study(made, folder, only=cases, jobs=jobs, say=progress(quiet))
    print_result(result.as_data(), lambda: f"{table(result)}\n{folder / 'report.html'}", as_json, quiet)
    if save_result:
        saved_study.save_study(result, save_result)
    if baseline is None:
        return
    comparison = saved_study.compare_with_saved(result, baseline)
    for line in comparison.off:
        click.echo(f"off: {line}", err=True)
    agreeing = comparison.compared - len(comparison.off)
    click.echo(f"{agreeing} of {comparison.compared} numbers agree with {baseline_result}", err=True)
    sys.exit(1 if comparison.off else 0)
