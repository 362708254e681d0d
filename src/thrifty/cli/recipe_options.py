"""Recipe options that several verbs share."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from thrifty.core.errors import UsageError
from thrifty.core.plain_values import read_budget

if TYPE_CHECKING:
    from thrifty.recipes.recipe_layers import RecipeLayers


SEED = click.IntRange(0, 2**63 - 1)
MESH = click.option(
    "--mesh",
    metavar="AXIS=SIZE,…",
    help="Number of ranks per axis: pipeline, replicate, shard, tensor.",
)

RANKS = click.option("--ranks", type=click.IntRange(min=1), default=1, help="Number of processes on this machine.")
MODEL_ARGUMENTS = click.option(
    "--model-arg",
    "model_arguments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the function that builds the model.",
)
HELD_OUT = click.option(
    "--held-out",
    metavar="FILE|PACKAGE.MODULE:NAME",
    help="File of held-out text, or your own held-out dataset, which your own --data requires.",
)
LOSS = click.option("--loss", help="Objective name, or your package.module:function(model, batch).")
OWN_MODEL = click.option(
    "--model", metavar="PACKAGE.MODULE:FUNCTION", help="Function that builds your own model, if the run trained it."
)


class _CheckpointType(click.ParamType):
    """Name or step of a checkpoint."""

    name = "checkpoint"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("best", "last"):
            return value
        with suppress(ValueError):
            return int(value)
        self.fail(f"{value!r} is not best, last or the step of a checkpoint", param, ctx)


CHECKPOINT = click.option(
    "--checkpoint",
    type=_CheckpointType(),
    default="last",
    show_default=True,
    metavar="best|last|STEP",
    help="Checkpoint of the run. best has the best held-out value.",
)


def together(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Combine click options and arguments into one decorator."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


DATA_HELP = (
    "File, folder, dataset name, hub:owner/name, or your own package.module:name: a dataset, or a function that "
    "returns a dataset."
)

recipe_options = together(
    click.argument("recipe", required=False),
    click.option("--data", help=DATA_HELP),
    HELD_OUT,
    LOSS,
    click.option("--model", help="Preset, Hugging Face folder, or your own package.module:function."),
    MODEL_ARGUMENTS,
    click.option("--budget", help="Length of training: 500steps, 1e7tokens, 3epochs, 90s, 10min or 2h."),
    click.option("--seed", type=int, help="Seed of the run."),
    click.option("--name", help="Name of the run and its folder under runs/."),
    click.option("--with", "additions", multiple=True, metavar="NAME:KEY=VALUE,…", help="Add a technique."),
    click.option("--without", "removals", multiple=True, metavar="NAME", help="Remove a technique."),
    MESH,
    click.option("--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Change any value of the recipe."),
)
"""RECIPE and the options that change it. `build_recipe` accepts these options as keyword arguments."""

run_options = together(
    click.option("--lr", type=click.FloatRange(0, min_open=True), help="Learning rate of the recipe's optimizer."),
    click.option("--batch", type=click.IntRange(1), help="Effective batch: examples per step over all ranks."),
    click.option("--length", type=click.IntRange(2), help="Tokens per example."),
    click.option("--steps", type=click.IntRange(1), help="Length of training in steps, in place of --budget."),
    click.option(
        "--epochs", type=click.FloatRange(0, min_open=True), help="Length of training in epochs, in place of --budget."
    ),
    click.option("--device", help="cpu, cuda, mps (Apple chip) or auto."),
    click.option(
        "--patience", type=click.IntRange(1), help="Stop early after this number of evaluations without improvement."
    ),
)
"""Short options for settings of a run. `build_recipe` accepts them too."""
SHORT = {
    "batch": "data.batch",
    "length": "data.length",
    "steps": "budget.steps",
    "epochs": "budget.epochs",
    "device": "device",
    "patience": "evaluation.patience",
}
"""Path in the recipe of each short option but --lr, which sets the optimizer's `lr`."""


def build_recipe(
    recipe: str | None = None,
    data: str | None = None,
    held_out: str | None = None,
    loss: str | None = None,
    model: str | None = None,
    model_arguments: tuple[str, ...] = (),
    budget: str | None = None,
    seed: int | None = None,
    name: str | None = None,
    additions: tuple[str, ...] = (),
    removals: tuple[str, ...] = (),
    assignments: tuple[str, ...] = (),
    mesh: str | None = None,
    lr: float | None = None,
    **short: Any,
) -> "RecipeLayers":
    """Return the layers of the recipe that the command line describes. `lr` and `short` are `run_options`.

    The default recipe is "text". With the user's own model, data or loss, the default is the same as in
    `thrifty.recipe`.
    """
    from thrifty.interface.recipe_arguments import layers_of, names_object
    from thrifty.interface.recipe_arguments import recipe as recipe_of
    from thrifty.recipes.recipe_layers import RecipeLayers

    sources = {"data": data, "held_out": held_out}
    is_own = any(map(names_object, (model, loss))) or any(names_object(each, True) for each in sources.values())
    if recipe is None and is_own:
        own = recipe_of(model, **sources, loss=loss, techniques=() if removals else additions)
        layers = RecipeLayers.above("the command line", own).apply_model(None, model_arguments)
        additions = additions if removals else ()
    else:
        layers = layers_of(recipe or "text")
        layers.apply_objects(data, held_out, loss)
        layers.apply_model(model, model_arguments)
    short = {option: value for option, value in short.items() if value is not None}
    _refuse_two_budgets({"budget": budget, **short})
    if budget is not None:
        layers.replace("--budget", "budget", read_budget(budget))
    for option, value in (("seed", seed), ("name", name)):
        if value is not None:
            layers.override(f"--{option}", {option: value})
    for option, value in short.items():
        layers.assign(f"--{option}", SHORT[option], value)
    layers.apply_changes(removals, additions, ())
    if lr is not None:
        layers.assign("--lr", f"techniques.{layers.optimizer_name('--lr')}.lr", lr)
    layers.apply_changes((), (), assignments).lower_rate()
    return layers if mesh is None else layers.apply_mesh(mesh)


def _refuse_two_budgets(options: Mapping[str, Any]) -> None:
    chosen = [f"--{name} {options[name]}" for name in ("budget", "steps", "epochs") if options.get(name) is not None]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} both set the length of training", fix=f"keep only {chosen[0]}")


def announce(layers: "RecipeLayers", quiet: bool = False) -> "RecipeLayers":
    """Print what each short option sets and which techniques are replaced, on standard error. Return the layers."""
    from thrifty.recipes.recipe_layers import PRETRAINED

    values = {} if quiet else layers.values()
    for path, value in values.items():
        option = layers.origins.get(path, "").removeprefix("--")
        if option == "lr" or option in SHORT:
            click.echo(f"--{option} sets {path} = {value}", err=True)
        elif option == PRETRAINED:
            click.echo(f"the model is pretrained, so {path} = {value}; --lr sets another", err=True)
    for name, by in ({} if quiet else layers.replaced).items():
        click.echo(f"{by} replaces {name} of the recipe", err=True)
    return layers


def read_moment(option: str, text: str, fix: str) -> int | float:
    """Return a number of steps or a fraction of a run. Raise UsageError with `fix` if the text is neither."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    raise UsageError(f"{option} {text!r} is not a number of steps or a fraction of a run", fix=fix)
