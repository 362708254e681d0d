"""Work of each rank in tests of sparse products, in a module that a new process can import."""

from collections.abc import Sequence

import pytest
from counted_products import count_products
from tiny_runs import advance, losses, plain_run, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core.technique import Technique


def train(strategies: Sequence[Sequence[Technique]], steps: int) -> list[tuple[list[float], float]]:
    """Return by strategy the losses, and the number of layers with sparse products in the last step."""
    count_products(pytest.MonkeyPatch())
    found = []
    for chosen in strategies:
        run = compose(plain_run(), with_optimizer(chosen), steps)
        state = run.start()
        records = advance(run, state)
        run.verify(state)
        found.append((losses(records), records[-1].notes["sparse_products"]))
    return found
