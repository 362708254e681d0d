"""`thrifty plan RECIPE`: which techniques to switch on under a budget, and why not the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.options import put_together, recipe_options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thrifty.core.recipe import Recipe
    from thrifty.planning.plans import Plan, Wanted
    from thrifty.planning.search import TimeOf
    from thrifty.preparing import Prepared

ALLOWED = ("exact", "rounding", "anything")
OTHERS = ("size", "fit")
"""Commands beside this one."""
EXPORTS = ("accelerate", "deepspeed", "torchtitan", "script")


@click.command(name="recipe")
@recipe_options
@click.option(
    "--memory", metavar="SIZE", help="Most a device may hold, such as 400MB or 16GiB; unless given what is free."
)
@click.option(
    "--hours", type=float, help="The time to spend; beside --tokens or --flops, the longest that they may take."
)
@click.option("--tokens", type=float, help="The tokens to train on.")
@click.option("--flops", type=float, help="The compute to spend, by the FLOPs of the plain model.")
@click.option(
    "--allow", type=click.Choice(ALLOWED), default="exact", show_default=True, help="What may change of values."
)
@click.option("--price", type=float, help="Of an hour of this machine, in any currency: also tells the cost.")
@click.option("--probe/--no-probe", default=True, help="Whether steps are run, or only counted.")
@click.option(
    "--seconds", type=float, default=20.0, show_default=True, help="How long the steps of one probe may take."
)
@click.option("--finalists", type=click.IntRange(1), default=4, show_default=True, help="Candidates that are run.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the recipe here, ready for thrifty train.")
@click.option(
    "--export", "exports", type=click.Choice(EXPORTS), multiple=True, help="Also write it for another trainer."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def of_recipe(
    recipe: str,
    out: Path | None,
    exports: tuple[str, ...],
    as_json: bool,
    memory: str | None,
    hours: float | None,
    tokens: float | None,
    flops: float | None,
    allow: str,
    price: float | None,
    probe: bool,
    seconds: float,
    finalists: int,
    **options: Any,
) -> None:
    """Choose techniques for RECIPE under a budget, by counting what candidates hold and running the best of them.

    Prints a recipe's changes, the forecast with intervals, the alternatives, and for every technique why it was taken
    or not. Changing nothing is an answer. Exit code 3 where nothing fits.
    """
    from thrifty.cli.plan_telling import tell
    from thrifty.cli.telling import print_json
    from thrifty.core.errors import UsageError

    if out is not None and out.exists():
        raise UsageError(f"{out} is there already", fix="name another file, or remove it")
    if exports and out is None:
        raise UsageError("--export needs --out, beside which it writes", fix="--out plan.toml")
    wanted = _wanted(memory, hours, tokens, flops, allow, price)
    _refuse_misspelled_command(recipe)
    plan = planned(put_together(recipe, **options).recipe(), wanted, probe, seconds, finalists, quiet=as_json)
    written = _written(plan, out, exports)
    if as_json:
        print_json(plan.as_dict() | {"written": [str(path) for path in written]})
    else:
        tell(plan, wanted, written)


def _refuse_misspelled_command(word: str) -> None:
    """Raises UsageError for what is no recipe and nearly the name of another kind of plan."""
    from difflib import get_close_matches

    from thrifty.core.errors import UsageError
    from thrifty.recipes import RECIPES

    near = get_close_matches(word, OTHERS, n=1)
    if near and word not in RECIPES and not Path(word).exists():
        raise UsageError(f"there is no recipe {word!r}", fix=f"did you mean {near[0]!r}?")


def planned(
    recipe: Recipe, wanted: Wanted, probe: bool = True, seconds: float = 20.0, finalists: int = 4, quiet: bool = False
) -> Plan:
    """The plan for a recipe on this machine. Raises Infeasible where nothing fits."""
    from dataclasses import replace
    from math import isinf

    from thrifty import techniques
    from thrifty.core.errors import UsageError
    from thrifty.planning.ledger import entries, expect
    from thrifty.planning.plans import STEPS, Planner
    from thrifty.planning.probe import free_memory
    from thrifty.planning.throughput import measure_throughput
    from thrifty.preparing import prepare
    from thrifty.recipes.toml import recipe_to_data

    if recipe.mesh.least_ranks > 1:
        raise UsageError("a plan is for one rank so far", fix="leave the mesh out, and see thrifty explain --mesh")
    prepared = prepare(recipe, steps=recipe.budget.steps or STEPS, quiet=quiet)
    run = prepared.run
    if isinf(wanted.memory):
        wanted = replace(wanted, memory=free_memory(run.device))
    outside = techniques.third_party().keys() - {technique.name for technique in recipe.techniques}
    catalogue = {name: techniques.find(name) for name in techniques.names() if name not in outside}
    plan = Planner(
        recipe=recipe,
        plain=run.plain,
        catalogue=catalogue,
        wanted=wanted,
        device=run.device,
        tokens=prepared.data.counted_as,
        rate=measure_throughput(0.4).sustained if not probe else 1.0,
        time=_probing(prepared, seconds) if probe else None,
        kept=entries(run.device.type),
        outside=sorted(outside),
        evidence=_evidence(catalogue),
        say=(lambda text: None) if quiet else (lambda text: click.echo(f"planning: {text}", err=True)),
        finalists=finalists,
    ).plan()
    forecast = plan.forecast
    expect(recipe_to_data(plan.recipe), {"memory": forecast.memory.value, "step": forecast.step.value} if probe else {})
    return plan


def _evidence(names: Iterable[str]) -> dict[str, str]:
    """What was measured of techniques, in a line each: a comparison in which nothing else changed, else any, else a
    study."""
    from thrifty.comparing.evidence import evidence, study_results

    found = {one.technique: one.in_words() for one in sorted(evidence(), key=lambda one: one.alone)}
    of_studies = {name: study_results(name) for name in names if name not in found}
    return found | {name: results[0].in_words() for name, results in of_studies.items() if results}


def _probing(prepared: Prepared, seconds: float) -> TimeOf:
    """Times candidates in processes of their own, once on a machine."""
    from dataclasses import replace

    from thrifty.planning.axes import MICRO_BATCHES
    from thrifty.planning.candidates import Candidate
    from thrifty.planning.predict import Timing
    from thrifty.planning.probes import Job, in_process, kept, sizes
    from thrifty.recipes.toml import recipe_to_data

    probe = kept(in_process([sys.executable, "-m", "thrifty.cli.plan_probe"]), prepared.run.device.type)
    joint = prepared.run.plain.objective.joint

    def time(candidate: Candidate) -> Timing:
        whole = tuple(t for t in candidate.techniques if joint or MICRO_BATCHES not in t.claims)
        tables = recipe_to_data(replace(prepared.recipe, techniques=whole))
        rows = (candidate.batch,) if joint else sizes(candidate.batch, candidate.parts, candidate.is_compiled)
        parts = 1 if joint else candidate.parts
        assert candidate.footprint is not None
        counted = (candidate.footprint.memory, candidate.footprint.flops)
        return probe(Job(tables, prepared.run.steps, rows, parts, seconds, counted))

    return time


def _wanted(
    memory: str | None,
    hours: float | None,
    tokens: float | None,
    flops: float | None,
    allow: str,
    price: float | None,
) -> Wanted:
    from math import inf

    from thrifty.core.errors import UsageError
    from thrifty.planning.axes import STRICTNESS
    from thrifty.planning.plans import Wanted
    from thrifty.planning.scaling_law import check_amount

    for name, amount in {"--hours": hours, "--tokens": tokens, "--flops": flops, "--price": price}.items():
        if amount is not None:
            check_amount(name, amount)
    if tokens is not None and flops is not None:
        raise UsageError("--tokens and --flops are both given", fix="give one of them")
    return Wanted(
        allow=STRICTNESS[ALLOWED.index(allow)],
        memory=inf if memory is None else read_size(memory),
        seconds=None if hours is None else 3600 * hours,
        tokens=tokens,
        flops=flops,
        price=price,
    )


def read_size(text: str) -> float:
    """`400MB`, `16GiB` or `4e8` in bytes."""
    import re

    from thrifty.core.errors import UsageError

    found = re.fullmatch(r"\s*([0-9]+\.?[0-9]*(?:e[0-9]+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else 0.0
    if size <= 0:
        raise UsageError(f"--memory {text!r} is no size", fix="for example 400MB, 16GB or 16GiB")
    return size


def _written(plan: Plan, out: Path | None, exports: tuple[str, ...]) -> list[Path]:
    """Writes the recipe, its forecast as a comment above it, and what else was asked for; the paths."""
    if out is None:
        return []

    from thrifty.cli.plan_exports import write_exports
    from thrifty.cli.plan_telling import in_words
    from thrifty.recipes.toml import write_recipe

    head = "".join(f"# {line}\n" for line in in_words(plan))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(head + "\n" + write_recipe(plan.recipe), encoding="utf-8")
    return [out, *write_exports(exports, plan, out)]
