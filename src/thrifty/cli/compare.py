"""`thrifty compare`: variants against a baseline at equal budget, over several seeds, with a verdict."""

import sys
from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import open_table, print_words, progress, wide_console


@click.command()
@recipe_options
@click.option(
    "--variant",
    "variants",
    metavar="[NAME:] CHANGES",
    multiple=True,
    help="A recipe, or changes of RECIPE by --with, --without and --set; may be given several times.",
)
@click.option(
    "--equal-budget",
    "equal",
    type=click.Choice(["time", "flops", "tokens", "steps"]),
    help="What every variant may spend of.  [default: time]",
)
@click.option("--seeds", type=int, help="Pairs of runs.  [default: 8]")
@click.option(
    "--rate-trials", "trials", type=int, help="Learning rates tried for each variant; 1 for none.  [default: 3]"
)
@click.option("--rate-factor", "factor", type=float, help="Between a learning rate and the next.  [default: 2]")
@click.option(
    "--min-effect",
    "effect",
    type=float,
    help="Smallest difference worth knowing, as a share of the loss.  [default: 0.01]",
)
@click.option("--warmup-steps", "pilot", type=int, help="Steps in which costs are measured.  [default: 24]")
@click.option(
    "--worker",
    "workers",
    metavar="COMMAND",
    multiple=True,
    help="Where runs are executed; given several times, side by side: here, or a command that starts a run on another "
    "machine.  [default: here]",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where its folder is kept.")
@click.option("--save-result", "keep", type=click.Path(path_type=Path), help="Keep the result as this .json file too.")
@click.option("--retry", is_flag=True, help="Run again what failed.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON at the end.")
def command(
    recipe: str,
    variants: tuple[str, ...],
    name: str | None,
    workers: tuple[str, ...],
    runs: Path,
    keep: Path | None,
    retry: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare variants with RECIPE, the baseline, at equal budget. A variant is another recipe, or changes of the
    baseline, quoted and spelled as for thrifty train:

    \b
        thrifty compare kjv --variant "--with growth.stacking"
        thrifty compare kjv --variant "lion: --without optimizers.adamw --with optimizers.lion:lr=2e-4"
        thrifty compare plain --variant "planned: plan.toml" --variant "--set data.batch=16"

    A name and a colon before the changes is what a variant is called. Changes outside the quotes (--data, --with,
    --set, …) are of the baseline and all its variants. Pilots measure what a step of each variant costs, every variant
    is tried at the same number of learning rates, and each seed is run with every variant in turn. The verdict is by
    held-out loss, of all planned pairs together. An interrupted comparison resumes where it stopped.
    """
    from dataclasses import fields

    from thrifty.comparing.comparison import ComparisonProtocol, compare
    from thrifty.comparing.comparison_workers import read_workers
    from thrifty.comparing.saved_comparison import refuse_existing_comparison, save_comparison
    from thrifty.comparing.variants import read_variants
    from thrifty.core.file_names import check_name
    from thrifty.core.plain_values import build

    values = {field.name: options.pop(field.name) for field in fields(ComparisonProtocol)}
    protocol = build(
        ComparisonProtocol, {key: value for key, value in values.items() if value is not None}, "comparison"
    )
    launchers = read_workers(workers, protocol.equal)
    if keep:
        refuse_existing_comparison(keep)
    baseline = build_recipe(recipe, **options)
    read = read_variants(variants, baseline, lambda other: build_recipe(other, **options))
    folder = runs / check_name(name or f"{read[0].recipe.name}-comparison", "--name")
    result = compare(read, protocol, folder, retry=retry, workers=launchers, say=progress(quiet))
    print_words(result, lambda: _tell(result), as_json, quiet)
    if keep and result["status"] == "finished":
        save_comparison(result, keep)
    sys.exit(result["exit_code"])


def _tell(result: dict[str, Any]) -> None:
    from rich.markup import escape

    from thrifty.reporting.comparison_page import about, cautions, tables, verdicts

    console = wide_console()
    console.print(about(result), markup=False)
    for title, _, head, rows in tables(result)[:4]:
        if not rows:
            continue
        table = open_table()
        for column in head:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(f"\n{title}", markup=False)
        console.print(table)
    console.print()
    for label, _, sentence in verdicts(result):
        console.print(f"{label}: {sentence}", markup=False)
    for caution in cautions(result):
        console.print(f"caution: {caution}", markup=False)
    for entry in result["runs"]:
        if entry["status"] == "failed":
            console.print(f"failed: {entry['run']} ({entry['arm']}): {entry['error']}", markup=False)
    if result["status"] == "interrupted":
        console.print("interrupted; the same command goes on")
    console.print(f"{result['folder']}/report.html", markup=False)
