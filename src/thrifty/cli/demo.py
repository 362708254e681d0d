"""`thrifty demo`: the whole story in a few minutes, by commands that anybody could give."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import click

PAIRS = 7
"""The fewest that can have a verdict."""


@click.command()
@click.option("--name", help="What its folders are called.  [default: demo-DATE-TIME]")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where they are kept.")
@click.option("--race", default="4s", show_default=True, help="What each run of the race may take.")
@click.option("--train", "budget", default="1min", show_default=True, help="How long the planned run is.")
def command(name: str | None, runs: Path, race: str, budget: str) -> None:
    """Plan a small language model on the King James Bible under a budget of memory, check the plan, race it against
    plain PyTorch for equal time, then train by it: each by a command that is shown. Without a network the text is the
    source of this Python.
    """
    name = name or time.strftime("demo-%Y%m%d-%H%M%S")
    folder, plan = str(runs), runs / f"{name}-plan.toml"
    runs.mkdir(parents=True, exist_ok=True)
    fetched = _shown("Real text: public domain, fetched once", "data", "get", "kjv") == 0
    text, is_raced = [] if fetched else ["--data", "python-stdlib"], True
    for about, *words in (
        ("What pays, and fits", "plan", "plain", *text, "--memory", "400MB", "--allow", "different", "--out", plan),
        ("Does it still compute what it promises?", "check", plan),
        (
            "Is it better than plain PyTorch, in equal time?", "compare", "plain", f"planned: {plan}", *text,
            "--budget", race, "--seeds", PAIRS, "--trials", 1,
            "--runs", folder, "--name", f"{name}-race",
        ),
        ("Then train by it", "train", plan, "--budget", budget, "--runs", folder, "--name", name),
        ("Look at the run", "report", runs / name),
        ("and at what it learned", "sample", runs / name, "--prompt", "And the LORD said", "--tokens", 60),
    ):  # fmt: skip
        if words[0] == "compare" and not (is_raced := _changes_something(plan)):
            click.echo("\nThe plan is plain PyTorch as it is: there is nothing to race.")
        elif code := _shown(about, *map(str, words)):
            sys.exit(code)
    click.echo()
    if is_raced:
        click.echo(f"The verdict, with charts: {runs / f'{name}-race' / 'report.html'}")
    click.echo(f"The run:                  {runs / name / 'report.html'}")


def _changes_something(plan: Path) -> bool:
    from thrifty.recipes.language_recipes import plain
    from thrifty.recipes.recipe_toml import read_recipe, recipe_to_data

    return recipe_to_data(read_recipe(plan))["techniques"] != recipe_to_data(plain())["techniques"]


def _shown(about: str, *words: str) -> int:
    """Runs a verb under the command that a person would type; its exit code."""
    click.secho(f"\n{about}\n$ {shlex.join(['thrifty', *words])}", bold=True)
    return subprocess.run([sys.executable, "-m", "thrifty", *words]).returncode
