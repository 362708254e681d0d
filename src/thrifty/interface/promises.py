"""`check`: does a combination of techniques keep its promises?"""

from thrifty.checking import promise_check
from thrifty.checking.check_verdicts import CheckReport
from thrifty.core.recipe import Recipe
from thrifty.interface.progress import progress


def check(
    recipe: Recipe,
    *,
    steps: int = promise_check.STEPS,
    examples: int = promise_check.EXAMPLES,
    length: int | None = None,
    ranks: bool = True,
    quiet: bool = False,
) -> CheckReport:
    """Check a recipe before it costs anything: a few steps of its own model on its own data, against the plain run.

    Checked are values where they are promised, gradients that reach every parameter, micro-batches against one large
    batch, ranks against one process, resuming, export, and which tokens are learned. `steps` are trained, on batches of
    `examples` of at most `length` tokens; `ranks=False` starts no processes.

    Raises UsageError for a recipe that could not be trained.

    Example::

        report = thrifty.check(recipe)
        assert not report.broken, report
    """
    say = progress(quiet, "checking: ")
    return promise_check.check(recipe, steps=steps, examples=examples, length=length, ranks=ranks, say=say)
