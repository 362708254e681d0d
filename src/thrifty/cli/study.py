"""`thrifty study NAME`: repeat a published experiment at small scale."""

from pathlib import Path

import click


@click.command("study")
@click.argument("study", metavar="NAME")
@click.option("--name", help="Folder name under runs/.  [default: NAME]")
@click.option("--set", "settings", multiple=True, metavar="SETTING=VALUE", help="Change a setting of the study.")
@click.option("--seeds", type=click.IntRange(min=1), help="Number of seeds.")
@click.option("--cases", multiple=True, metavar="WORD", help="Measure only cases whose label contains this word.")
@click.option("--jobs", type=click.IntRange(min=1), help="Parallel processes.  [default: one per core]")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Parent folder.  [default: runs]")
@click.option("--save-result", type=click.Path(path_type=Path), help="Also write the result to this .json file.")
@click.option("--baseline-result", type=click.Path(path_type=Path), help="Compare with this saved result.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON at the end.")
def command(
    study: str,
    name: str | None,
    settings: tuple[str, ...],
    seeds: int | None,
    cases: tuple[str, ...],
    jobs: int | None,
    runs: Path,
    save_result: Path | None,
    baseline_result: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run the study NAME (`thrifty list studies`). Prints a table and a verdict on each expectation, and writes a page
    with plots.

    The same command resumes an interrupted study. With --baseline-result, the exit code is 1 if a value is outside the
    interval of the saved result.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    result = thrifty.study(
        study, name=name, settings=settings, seeds=seeds, cases=cases, jobs=jobs, runs=runs,
        save_result=save_result, baseline_result=baseline_result, quiet=quiet,
    )  # fmt: skip
    for line in result.off:
        click.echo(f"off: {line}", err=True)
    if baseline_result:
        agreeing = result.compared - len(result.off)
        click.echo(f"{agreeing} of {result.compared} values agree with {baseline_result}", err=True)
    print_result(result, as_json, quiet)
