"""Refusals of composition, and its handling of state, notes and structural changes."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from tiny_runs import advance, plain_run, run_through, technique
from torch import Tensor, nn

from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique

ADAMW = technique("optimizers.adamw")


def test_two_techniques_with_one_claim_are_refused() -> None:
    with pytest.raises(UsageError, match=r"optimizers\.adamw and optimizers\.lion both decide the optimizer") as error:
        compose(plain_run(), [technique("optimizers.lion"), ADAMW], 10)
    assert "--without optimizers.adamw" in error.value.fix


def test_clash_is_refused_with_its_reason() -> None:
    chosen = [ADAMW, technique("adapters.lora"), technique("sparsity.rigl")]
    for order in (chosen, chosen[::-1]):
        with pytest.raises(
            UsageError, match=r"cannot be combined: it drops and grows weights that adapters keep frozen"
        ):
            compose(plain_run(), order, 10)


def test_techniques_for_random_weights_refuse_trained_weights() -> None:
    refused = [name for name in techniques.names() if Claim.TRAINED_START in technique(name).clashes]
    for name in refused:
        with pytest.raises(RefusedError, match=f"^{name} is not for trained weights: ") as error:
            compose(replace(plain_run(), is_trained=True), [ADAMW, technique(name)], 10)
        assert f"--without {name}" in error.value.fix
        compose(plain_run(), [ADAMW, technique(name)], 10)
    assert {name for name in techniques.names() if name.startswith("initializations.")} <= {*refused}


def test_duplicate_technique_is_refused() -> None:
    with pytest.raises(UsageError, match=r"gradients\.clip is listed twice"):
        compose(plain_run(), [ADAMW, technique("gradients.clip"), technique("gradients.clip", max_norm=2.0)], 10)


def test_run_without_an_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="no technique decides the optimizer") as error:
        compose(plain_run(), [technique("gradients.clip")], 10)
    assert "--with optimizers.adamw" in error.value.fix


def test_refusal_names_the_technique() -> None:
    run = compose(plain_run(), [ADAMW, technique("adapters.lora", where="nowhere")], 10)
    with pytest.raises(RefusedError, match=r"^adapters\.lora: no module matches 'nowhere'"):
        run.start()


def test_changed_modules_are_noted_by_technique() -> None:
    run = compose(plain_run(depth=3), [ADAMW, technique("memory.recompute", every=2)], 10)
    run.build_model()
    assert run.notes == {"optimizers.adamw": [], "memory.recompute": ["2 of 3 blocks in blocks"]}


def test_moments_are_resolved_to_steps() -> None:
    run = compose(plain_run(), [ADAMW, technique("schedules.linear", warmup=0.1, until=1.0)], 200)
    assert next(t for t in run.techniques if t.name == "schedules.linear") == technique(
        "schedules.linear", warmup=20, until=200
    )


class Counting(Technique):
    """Technique whose backward pass counts its steps."""

    stage: ClassVar[Stage] = Stage.MEASURE
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def backward(self, backward: Backward) -> Backward:
        class CountingBackward:
            def __init__(self) -> None:
                self.state: dict[str, Tensor] = {"seen": torch.zeros(())}

            def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
                self.state["seen"] += 1
                return backward(model, objective, batch)

        return CountingBackward()


def test_backward_state_survives_a_structural_change() -> None:
    _, state = run_through(plain_run(), [ADAMW, Counting(), technique("growth.stacking")], 5)
    assert state.tensors()["techniques/counting/seen"] == 5
    _, state = run_through(plain_run(), [ADAMW, Counting(), technique("large_batch.gradient_accumulation")], 3)
    assert state.tensors()["techniques/counting/seen"] == 3


class Never(Technique):
    stage: ClassVar[Stage] = Stage.GROW
    numerics: ClassVar[Numerics] = Numerics.EXACT
    at: int = 2

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        return StructuralChange("nothing new", {"at": step}) if step == self.at else None

    def holds(self, state: TrainState) -> None:
        if state.log:
            raise IntegrityError(f"{self.name}: something was changed")


def test_broken_promise_stops_the_run_at_the_change() -> None:
    run = compose(plain_run(), [ADAMW, Never()], 5)
    state = run.start()
    with pytest.raises(IntegrityError, match="something was changed"):
        advance(run, state)
    assert state.step == 2


def test_empty_structural_change_is_exact() -> None:
    """Gathering, rebuilding and loading are exact, also for the optimizer state."""

    class Silent(Never):
        def holds(self, state: TrainState) -> None:
            pass

    expected, plain = run_through(plain_run(), [ADAMW], 5)
    records, state = run_through(plain_run(), [ADAMW, Silent()], 5)
    assert [record.loss for record in records] == [record.loss for record in expected]
    assert [len(record.changes) for record in records] == [0, 0, 1, 0, 0]
    assert all(torch.equal(tensor, plain.tensors()[name]) for name, tensor in state.tensors().items())
