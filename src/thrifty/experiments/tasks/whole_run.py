"""Initialization and complete training of a small model, shared by all studies."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

from torch import nn

from thrifty.composition.compose import Run
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.core.state import TrainState
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.training.loop import Record, train


def initialized(shape: ModelConfig, seed: int) -> nn.Module:
    """Build a model from its config `shape`, and initialize it from `seed`."""
    model = assemble(shape)
    initialize(model, seed)
    return model


def run_to_end(
    run: Run, seed: int, may_diverge: bool = False, see: Callable[[Record], object] = lambda record: None
) -> tuple[nn.Module, TrainState]:
    """Train a run to its end; return the model and the state.

    With `may_diverge`, a run that ends early because of divergence returns its state at that step. `see` is called with
    the record of each step.
    """
    state = run.start()
    try:
        with closing(train(run, state, seed)) as records:
            for record in records:
                see(record)
    except IntegrityError:
        raise
    except ThriftyError:  # raised by the loop if the loss or gradient stays non-finite
        if not may_diverge:
            raise
    assert state.model is not None
    return state.model, state


def in_steps(run: Run, seed: int) -> Iterator[tuple[int, nn.Module, Mapping[str, float]]]:
    """Yield (step, model, notes) before training and after each step."""
    state = run.start()
    assert state.model is not None
    yield 0, state.model, {}
    with closing(train(run, state, seed)) as records:
        for record in records:
            yield record.step, state.model, record.notes
