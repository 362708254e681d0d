"""Work of each rank in tests of tickets, in a module that a new process can import."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from shard_work import in_float64
from tiny_runs import advance, losses

from thrifty.composition.compose import compose
from thrifty.core.state import full_value
from thrifty.core.technique import Technique

STEPS = 5


def trained_with(chosen: Sequence[Technique]) -> tuple[list[float], dict[str, np.ndarray], list[Any]]:
    """Return losses, final whole parameters and decisions of a float64 run."""
    run = compose(in_float64(), chosen, STEPS)
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    assert state.model is not None
    parameters = {name: full_value(parameter).numpy() for name, parameter in state.model.named_parameters()}
    return losses(records), parameters, [dict(entry.decision) for entry in state.log]
