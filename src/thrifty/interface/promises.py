"""`check`: test whether a recipe keeps the promises of its techniques."""

from pathlib import Path
from typing import Unpack

from thrifty.checking import promise_check
from thrifty.checking.check_verdicts import CheckReport
from thrifty.core.recipe import Recipe
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from


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
    """Check a recipe before a long run. Train its model for a few steps and compare with the run without techniques.

    The check covers promised values, gradients of every parameter, resume, export, and the tokens that have a loss. It
    also compares micro-batches with one batch, and ranks with one process.

    Args:
        recipe: A recipe, its name or its file. `arguments` are as in `thrifty.recipe`.
        steps: Number of steps to train.
        examples: Number of examples per batch.
        length: Maximum number of tokens per example.
        ranks: False to skip the check with several ranks, which starts processes.

    Raises UsageError if the recipe cannot be trained.

    Example::

        report = thrifty.check(recipe)
        assert not report.broken, report
    """
    say = progress(quiet, "checking: ")
    chosen = recipe_from("check", recipe, arguments)
    return promise_check.check(chosen, steps=steps, examples=examples, length=length, ranks=ranks, say=say)
