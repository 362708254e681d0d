"""Order of stages."""

from dataclasses import field
from typing import ClassVar

import pytest
from tiny_runs import plain_run, technique
from torch import Tensor, nn

from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, chain
from thrifty.core.objective import Objective
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique

CALLS: list[str] = []


class RecordingTransform(GradientTransform):
    def __init__(self, name: str):
        self.name = name

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        CALLS.append(self.name)
        return updates


class Around(GradientTransform):
    name = "around"

    def __init__(self, inner: GradientTransform, word: str):
        self.inner, self.word = inner, word
        self.scalars, self.init = inner.scalars, inner.init  # type: ignore[method-assign]

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        CALLS.append(f"{self.word} in")
        updates = self.inner.update(updates, slots, parameters, numbers)
        CALLS.append(f"{self.word} out")
        return updates


class RecordingTechnique(Technique):
    """Technique that records each call of its methods."""

    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    word: str = field(default="")

    def model(self, model: nn.Module) -> nn.Module:
        CALLS.append(f"{self.word} model")
        return model

    def backward(self, backward: Backward) -> Backward:
        def recorded(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            CALLS.append(f"{self.word} before")
            outcome = backward(model, objective, batch)
            CALLS.append(f"{self.word} after")
            return outcome

        return recorded


class First(RecordingTechnique):
    stage = Stage.INITIALIZE

    def update(self, transform: GradientTransform) -> GradientTransform:
        return Around(transform, self.word)


class Second(RecordingTechnique):
    stage = Stage.ACCUMULATE

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(RecordingTransform(self.word), transform)


@pytest.mark.parametrize("reverse", [False, True])
def test_models_and_gradients_pass_in_stage_order(reverse: bool) -> None:
    chosen = [First(word="first"), Second(word="second"), technique("optimizers.adamw")]
    run = compose(plain_run(depth=1), chosen[::-1] if reverse else chosen, 1)
    CALLS.clear()
    state = run.start()
    assert CALLS == ["first model", "second model"]
    CALLS.clear()
    assert state.model is not None and state.optimizer is not None
    run.backward(state.model, run.objective, run.source.at(0))
    assert CALLS == ["first before", "second before", "second after", "first after"]
    CALLS.clear()
    state.optimizer.step()
    assert CALLS == ["first in", "second", "first out"]


def test_stages_are_unique_and_groups_ordered() -> None:
    labels = [stage.label for stage in Stage]
    assert len(set(labels)) == len(labels) == 26
    assert Stage.PRECISION < Stage.SPLIT < Stage.CUT <= Stage.SHARD < Stage.SOURCE
    assert Stage.SOURCE < Stage.SELECT < Stage.RESIZE < Stage.RESHAPE < Stage.OBJECTIVE
    assert Stage.CLIP < Stage.PRECONDITION < Stage.SCHEDULE < Stage.AVERAGE


def test_gradients_are_reduced_once_after_all_micro_batches() -> None:
    assert Stage.MEASURE < Stage.REDUCE < Stage.ACCUMULATE < Stage.CLIP


def test_every_technique_has_a_stage() -> None:
    assert all(techniques.find(name).stage in Stage for name in techniques.names())
