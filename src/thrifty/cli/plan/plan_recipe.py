"""`thrifty plan RECIPE`: which techniques to switch on under a budget, and why not the rest."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import inf, isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_words
from thrifty.core.errors import UsageError
from thrifty.core.plain_values import read_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thrifty.cli.plan.user_model import UserModel
    from thrifty.core.recipe import Recipe
    from thrifty.planning.forecast import PlanRequest

ALLOWED = ("exact", "rounding", "different")
OTHERS = ("size", "fit")
"""Commands beside this one."""
EXPORTS = ("accelerate", "deepspeed", "torchtitan", "script")
WANTED = ("memory", "disk", "hours", "tokens", "flops", "allow", "price")
"""Options that say what is asked of a plan: see `_wanted`."""
PROBING = ("probe", "probe_seconds", "probed_candidates", "seconds")
"""Options that only apply when steps are run, or could be."""


@click.command(name="recipe")
@recipe_options
@click.option(
    "--memory",
    metavar="SIZE",
    help="Most a rank may hold, on a processor its process: 800MB, 16GiB.  [default: what is free]",
)
@click.option("--disk", metavar="SIZE", help="Most that checkpoints and prepared data may take together.")
@click.option(
    "--hours", type=float, help="The time to spend; beside --tokens or --flops, the longest that they may take."
)
@click.option("--tokens", type=float, help="The tokens to train on.")
@click.option("--flops", type=float, help="The compute to spend, by the FLOPs of the plain model.")
@click.option(
    "--allow", type=click.Choice(ALLOWED), default="exact", show_default=True, help="What may change of values."
)
@click.option(
    "--price-per-hour", "price", type=float, help="Of an hour of this machine, in any currency: also tells the cost."
)
@click.option("--probe/--no-probe", default=None, help="Whether steps are run, or only counted.  [default: probe]")
@click.option("--probe-seconds", type=float, help="How long the steps of one probe may take.  [default: 20]")
@click.option("--probed-candidates", type=click.IntRange(1), help="Candidates that are run.  [default: 4]")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="How long planning may take.  [default: a fifth of the run's time, at least 60]",
)
@click.option("--cluster", metavar="NAME|FILE", help="Plan for a cluster that is not here, by simulation.")
@click.option("--ranks", type=click.IntRange(1), help="Devices: of this machine, or of the cluster, unless all of it.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the recipe here, ready for thrifty train.")
@click.option(
    "--export", "exports", type=click.Choice(EXPORTS), multiple=True, help="Also write it for another trainer."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_recipe(
    recipe: str,
    out: Path | None,
    exports: tuple[str, ...],
    as_json: bool,
    cluster: str | None,
    ranks: int | None,
    **options: Any,
) -> None:
    """Choose techniques for RECIPE under a budget, by counting what candidates hold and running the best of them.

    Prints a recipe's changes, the forecast with intervals, the alternatives, and for every technique why it was taken
    or not. Changing nothing is an answer. Exit code 3 where nothing fits.
    """
    from thrifty.cli.plan.plan_exports import write_exports
    from thrifty.cli.plan.plan_local import plan_on_machine
    from thrifty.cli.plan.plan_output import format_plan, print_plan
    from thrifty.cli.plan.user_model import is_own, own_model

    if out is not None and out.exists():
        raise UsageError(f"{out} is there already", fix="name another file, or remove it")
    if exports and out is None:
        raise UsageError("--export needs --out, beside which it writes", fix="--out plan.toml")
    wanted = _wanted(**{name: options.pop(name) for name in WANTED})
    probing = {name: value for name in PROBING if (value := options.pop(name)) is not None}
    _refuse_misspelled_command(recipe)
    model = own_model(options.pop("model")) if is_own(options["model"]) else None
    with _units_of(cluster):
        chosen = build_recipe(recipe, **options).recipe()
    if model is not None and "script" in exports:
        raise UsageError(
            "--export script writes the model that a recipe names, and --model names one of your own",
            fix="leave --export script out; the other exports work",
        )
    if cluster is not None:
        _refuse_probes(probing)
        _on_cluster(chosen, wanted, model, cluster, ranks, out, exports, as_json)
        return
    plan = plan_on_machine(chosen, wanted, model, **probing, ranks=ranks or 1, quiet=as_json)
    written = _written(plan.recipe, [*format_plan(plan), *_named(model)], out)
    try:
        written += write_exports(exports, plan, out) if out is not None else []
    finally:  # a plan that took minutes is told, whatever becomes of its exports
        facts = plan.as_dict() | {"written": [str(path) for path in written]}
        print_words(facts, lambda: print_plan(plan, written, _start(model, plan.chosen.ranks)), as_json)


def _units_of(cluster: str | None) -> AbstractContextManager[None]:
    """Let recipes choose number formats by the device that is planned for."""
    from thrifty.machine.cpu_features import assume_bfloat16
    from thrifty.planning.cluster_file import read_cluster

    return nullcontext() if cluster is None else assume_bfloat16(read_cluster(cluster).device.has_fast_bfloat16)


def _start(model: UserModel | None, ranks: int = 1) -> str:
    """What starts a written plan: a recipe cannot name a model of the user's own."""
    from thrifty.training.process_launch import launch_command

    if model is None:
        return launch_command(ranks)
    function = model.name.partition(":")[2]
    under = f" under torchrun --nproc-per-node {ranks}" if ranks > 1 else ""
    return f"thrifty.training.trainer.train(…, model={function}) in Python{under}, from"


def _named(model: UserModel | None) -> list[str]:
    return [f"model    {model.name}, which is given to thrifty.training.trainer.train as model="] if model else []


def _refuse_probes(options: dict[str, Any]) -> None:
    """Raises UsageError for options about steps that are run, of which a plan for a cluster has none."""
    if options:
        name, value = next(iter(options.items()))
        option = "--no-probe" if value is False else f"--{name.replace('_', '-')}"
        raise UsageError(
            f"{option} is for plans of this machine: steps on a cluster are simulated, and none is run",
            fix=f"leave {option} out",
        )


def _on_cluster(
    recipe: Recipe,
    wanted: PlanRequest,
    model: UserModel | None,
    place: str,
    ranks: int | None,
    out: Path | None,
    exports: tuple[str, ...],
    as_json: bool,
) -> None:
    from thrifty.cli.plan.plan_cluster import format_cluster_plan, plan_on_cluster, print_cluster_plan

    if not isinf(wanted.disk):
        raise UsageError("--disk is for plans of one device", fix="leave it out: nothing is told of a cluster's disks")
    if exports:
        raise UsageError(
            "--export is for plans of one device",
            fix="write the plan with --out, and export it with thrifty plan PLAN.toml without --cluster",
        )
    plan = plan_on_cluster(recipe, wanted, place, ranks, model, quiet=as_json)
    written = _written(plan.recipe, [*format_cluster_plan(plan), *_named(model)], out)
    facts = plan.as_dict() | {"written": [str(path) for path in written]}
    print_words(facts, lambda: print_cluster_plan(plan, written), as_json)


def _refuse_misspelled_command(word: str) -> None:
    """Raises UsageError for what is no recipe and nearly the name of another kind of plan."""
    from difflib import get_close_matches

    from thrifty.recipes import RECIPES

    near = get_close_matches(word, OTHERS, n=1)
    if near and word not in RECIPES and not Path(word).exists():
        raise UsageError(f"there is no recipe {word!r}", fix=f"did you mean {near[0]!r}?")


def _wanted(
    memory: str | None,
    disk: str | None,
    hours: float | None,
    tokens: float | None,
    flops: float | None,
    allow: str,
    price: float | None,
) -> PlanRequest:
    from thrifty.core.technique import Numerics
    from thrifty.planning.forecast import PlanRequest
    from thrifty.planning.scaling_law import check_amount

    for name, amount in {"--hours": hours, "--tokens": tokens, "--flops": flops, "--price-per-hour": price}.items():
        if amount is not None:
            check_amount(name, amount)
    if tokens is not None and flops is not None:
        raise UsageError("--tokens and --flops are both given", fix="give one of them")
    return PlanRequest(
        allow=Numerics(allow),
        memory=inf if memory is None else read_size(memory),
        disk=inf if disk is None else read_size(disk, "--disk"),
        seconds=None if hours is None else 3600 * hours,
        tokens=tokens,
        flops=flops,
        price=price,
    )


def _written(recipe: Recipe, forecast: Iterable[str], out: Path | None) -> list[Path]:
    """Writes the recipe with its forecast as a comment above it; the path."""
    if out is None:
        return []

    from thrifty.core.file_names import comment_lines
    from thrifty.recipes.recipe_toml import write_recipe

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(comment_lines(forecast) + "\n" + write_recipe(recipe), encoding="utf-8")
    return [out]
