"""`thrifty check`: does a recipe's combination of techniques still compute what it promises?"""

import sys
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import open_table, print_result, progress, wide_console


@click.command()
@recipe_options
@click.option("--steps", type=click.IntRange(min=3), default=4, show_default=True, help="Steps that are trained.")
@click.option("--examples", type=click.IntRange(min=2), default=4, show_default=True, help="Of an effective batch.")
@click.option("--length", type=click.IntRange(min=2), help="Tokens of an example, if fewer than the recipe's.")
@click.option("--ranks/--no-ranks", default=True, help="Whether to start processes where the recipe has a mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(steps: int, examples: int, length: int | None, ranks: bool, as_json: bool, **options: Any) -> None:
    """Check RECIPE before it costs anything: a few steps of its own model on its own data, against the plain run.

    Values where they are promised, gradients that reach every parameter, micro-batches against one big batch, ranks
    against one process, resuming, export, and which tokens are learned. The exit code is 4 if a promise is broken.
    """
    from thrifty.checking.promise_check import check

    recipe = build_recipe(**options).recipe()
    say = progress(as_json, "checking: ")
    checked = check(recipe, steps=steps, examples=examples, length=length, ranks=ranks, say=say)
    print_result(checked.as_dict(), lambda: _tell(checked), as_json)
    sys.exit(checked.exit_code)


def _tell(checked: Any) -> None:
    from rich.markup import escape

    console, table = wide_console(), open_table("promise", "of", "verdict", "measured")
    colours = {"holds": "green", "broken": "bold red", "not applicable": "dim"}
    for verdict in checked.verdicts:
        text = verdict.measured + (f"\nfix: {verdict.fix}" if verdict.fix else "")
        colour = colours[verdict.outcome]
        outcome = f"[{colour}]{verdict.outcome}[/{colour}]"
        table.add_row(escape(verdict.promise), escape(verdict.about), outcome, escape(text))
    console.print(f"{checked.name}: {', '.join(checked.cuts)}\n", markup=False)
    console.print(table)
    for text in checked.preview:
        console.print(f"\nwhat is learned of an example stands between ⟦ and ⟧\n{text}", markup=False)
    broken = len(checked.broken)
    said = f"{broken} broken" if broken else "nothing is broken"
    console.print(f"\n{said}; {len(checked.verdicts)} promises looked at in {checked.seconds:g} s")
