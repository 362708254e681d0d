"""`check`: test that a combination of techniques keeps its promises."""

from pathlib import Path
from typing import Unpack

from thrifty.checking import promise_check
from thrifty.checking.check_verdicts import CheckReport
from thrifty.core.recipe import Recipe
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments
from thrifty.interface.recipe_arguments import recipe as recipe_of


def check(
    recipe: Recipe | str | Path | None = None,
    *,
    steps: int = promise_check.STEPS,
    examples: int = promise_check.EXAMPLES,
    length: int | None = None,
    ranks: bool = True,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> CheckReport:
    """Check a recipe before a long run: train its model on its data for a few steps and compare with the plain run.

    The check covers promised values, gradients of every parameter, micro-batches against one batch, ranks against one
    process, resume, export, and which tokens are trained.

    Args:
        recipe: Value, name or file; `arguments` are those of `thrifty.recipe`.
        steps: Steps to train.
        examples: Examples in a batch.
        length: Most tokens in an example.
        ranks: False starts no processes.

    Raises UsageError for a recipe that cannot be trained.

    Example::

        report = thrifty.check(recipe)
        assert not report.broken, report
    """
    say = progress(quiet, "checking: ")
    chosen = recipe_of(recipe=recipe, **arguments)
    return promise_check.check(chosen, steps=steps, examples=examples, length=length, ranks=ranks, say=say)
