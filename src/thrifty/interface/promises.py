"""`check`: does a combination of techniques keep its promises?"""

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
    """Check a recipe before it costs anything: a few steps of its own model on its own data, against the plain run.

    `recipe` is a value, a name or a file; `arguments` are those of `thrifty.recipe`. Checked are values where they are
    promised, gradients that reach every parameter, micro-batches against one large batch, ranks against one process,
    resuming, export, and which tokens are learned. `steps` are trained, on batches of `examples` of at most `length`
    tokens; `ranks=False` starts no processes.

    Raises UsageError for a recipe that could not be trained.

    Example::

        report = thrifty.check(recipe)
        assert not report.broken, report
    """
    say = progress(quiet, "checking: ")
    chosen = recipe_of(recipe=recipe, **arguments)
    return promise_check.check(chosen, steps=steps, examples=examples, length=length, ranks=ranks, say=say)
