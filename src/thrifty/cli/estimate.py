"""`thrifty estimate`: predict the memory of a training step, and list changes that make the step fit."""

from functools import partial
from typing import Any

import click

from thrifty.cli.recipe_options import DATA_HELP, LOSS, MODEL_ARGUMENTS
from thrifty.cli.verb_output import print_result


@click.command()
@click.argument("model")
@click.option("--data", help=f"{DATA_HELP} By default, examples are random.")
@click.option("--memory", help="Available memory, such as 24GB. By default the memory of --device.")
@click.option("--batch", type=click.IntRange(min=1), help="Number of examples per step.")
@click.option("--length", type=click.IntRange(min=2), help="Number of tokens per example.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or a GPU name, such as h100.")
@MODEL_ARGUMENTS
@click.option("--optimizer", default="adamw", show_default=True, metavar="NAME:KEY=VALUE,…")
@click.option("--with", "additions", multiple=True, metavar="NAME:KEY=VALUE,…", help="Add a technique.")
@LOSS
@click.option(
    "--allow",
    type=click.Choice(["exact", "rounding", "different"]),
    default="different",
    show_default=True,
    help="Largest change of numerical values that proposed changes may make.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    model: str,
    model_arguments: tuple[str, ...],
    optimizer: str,
    additions: tuple[str, ...],
    loss: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Estimate the memory and FLOPs of a training step of MODEL, and the cheapest changes that make it fit --memory.

    MODEL is a preset, a Hugging Face folder with or without weights, a config.json, or your own
    package.module:function, which requires --data. No weights are read and nothing is trained. The exit code is 3 if
    the step does not fit.
    """
    import thrifty

    fit = thrifty.estimate(
        _with_arguments(model, ",".join(model_arguments)),
        options.pop("batch"),
        loss=loss,
        optimizer=optimizer,
        techniques=additions,
        **options,
    )
    print_result(fit, as_json)


def _with_arguments(model: str, words: str) -> Any:
    from thrifty.core.user_sources import import_function
    from thrifty.recipes.recipe_layers import toml_table

    return partial(import_function(model), **toml_table(words, words, "--model-arg", "")) if words else model
