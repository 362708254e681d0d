"""Work of each rank in tests of weight masks, in a module that a new process can import."""

from collections.abc import Sequence

from tiny_runs import advance, plain_run, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.core.state import full_value
from thrifty.optim.weight_masks import masks_in

STEPS = 3


def masks_of_each(strategy: str, names: Sequence[str]) -> dict[str, dict[str, set[int]]]:
    """Return the final mask of each weight, by technique."""
    found = {}
    for name in names:
        chosen = [technique(name, density=0.3), *([technique(strategy)] if strategy else [])]
        try:
            run = compose(plain_run(depth=1), with_optimizer(chosen), STEPS)
        except UsageError:
            continue
        state = run.start()
        advance(run, state)
        run.verify(state)
        masks = {key: full_value(mask) for key, mask in masks_in(state).items()}
        found[name] = {key: set(mask.flatten().nonzero().flatten().tolist()) for key, mask in masks.items()}
    return found


def masks_under_each(strategies: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, dict[str, set[int]]]]:
    return {strategy: masks_of_each(strategy, names) for strategy in strategies}
