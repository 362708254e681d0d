"""Functions that each rank runs in tests of encoders without mask tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
from technique_runs import masked_run
from tensor_work import laid
from tiny_runs import advance, losses, technique, with_optimizer

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.state import full_value
from thrifty.core.technique import Technique
from thrifty.techniques.data_selection.drop_masked_tokens import DropMaskedTokens

ACCUMULATED = technique("large_batch.gradient_accumulation")
SETTINGS: Mapping[str, Sequence[Technique]] = {
    "self": [DropMaskedTokens(blocks=1), ACCUMULATED],
    "cross": [DropMaskedTokens(blocks=1, attend="cross"), ACCUMULATED],
}
ALONG: Mapping[str, tuple[dict[str, int], Sequence[Technique]]] = {
    "shard": ({"shard": 2}, [technique("parallelism.shard")]),
    "tensor": ({"tensor": 2}, [technique("parallelism.tensor")]),
    "tokens": ({"tensor": 2}, [technique("parallelism.tensor", sequence_parallel=True)]),
}


def double() -> BaseRun:
    plain = masked_run(length=20)  # a divisible number of visible tokens
    return BaseRun(lambda: plain.build().double(), plain.source, plain.objective)


def trained_along() -> dict[tuple[str, str], tuple[list[float], dict[str, np.ndarray]]]:
    """Return losses and full parameters by parallel axis and kind of decoder."""
    results = {}
    for axis, (sizes, dividing) in ALONG.items():
        for name, chosen in SETTINGS.items():
            with laid(**sizes):
                run = compose(double(), with_optimizer([*chosen, *dividing]), 4)
                state = run.start()
                records = advance(run, state)
                run.verify(state)
                assert state.model is not None
                values = {path: full_value(value).numpy() for path, value in state.model.named_parameters()}
                results[axis, name] = losses(records), values
    return results
