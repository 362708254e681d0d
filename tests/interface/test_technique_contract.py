"""The contract test of techniques finds what is broken, and passes what keeps it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import technique
from torch import Tensor, nn

import thrifty
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, chain
from thrifty.core.objective import Objective, Prediction, WrappedObjective

EXACT, ROUNDING, DIFFERENT = thrifty.Numerics.EXACT, thrifty.Numerics.ROUNDING, thrifty.Numerics.DIFFERENT


class Nothing(thrifty.Technique):
    stage, numerics = thrifty.Stage.PRECONDITION, DIFFERENT


class Halving(GradientTransform):
    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return [update / 2 for update in updates]


class Halved(thrifty.Technique):
    stage, numerics = thrifty.Stage.PRECONDITION, DIFFERENT
    rate: float = 0.5

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(Halving(), transform)


@pytest.mark.parametrize("kind", [Nothing, Halved, Halved(rate=0.1), "clip"])
def test_a_technique_that_keeps_its_contract_is_reported(kind: Any) -> None:
    report = thrifty.testing.check_technique(kind)
    assert not report.broken and {"settings", "resume", "own loop"} <= {each.promise for each in report.verdicts}
    assert "nothing is broken" in str(report)


class Unstaged(thrifty.Technique):
    numerics = DIFFERENT


class Tolerant(thrifty.Technique):
    stage, numerics, tolerance = thrifty.Stage.CLIP, DIFFERENT, 1e-3


class Unequal(thrifty.Technique):
    stage, numerics = thrifty.Stage.CLIP, DIFFERENT
    rate: float = 0.5

    def __hash__(self) -> int:
        return id(self)


class Unlearned(thrifty.Technique):
    stage, numerics = thrifty.Stage.CLIP, DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})


class Renaming(thrifty.Technique):
    stage, numerics = thrifty.Stage.ARCHITECTURE, DIFFERENT

    def model(self, model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.renamed = block.mlp
            del block.mlp
            block.mlp = lambda x, own=block.renamed: own(x)
        return model


class Scaled(WrappedObjective):
    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return 1.01 * super().losses(prediction, batch)


class NotExact(thrifty.Technique):
    stage, numerics = thrifty.Stage.OBJECTIVE, EXACT

    def objective(self, objective: Objective) -> Objective:
        return Scaled(objective)


class Forgetful(thrifty.Technique):
    """A backward pass that remembers its calls where no checkpoint sees them."""

    stage, numerics = thrifty.Stage.MEASURE, DIFFERENT

    def backward(self, backward: Backward) -> Backward:
        calls = []

        def counted(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            calls.append(1)
            outcome = backward(model, objective, batch)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(len(calls))
            return outcome

        return counted


class Unlearning(thrifty.Technique):
    stage, numerics = thrifty.Stage.CLIP, DIFFERENT

    def update(self, transform: GradientTransform) -> GradientTransform:
        class Reversed(GradientTransform):
            def update(self, updates: list[Tensor], *_: Any) -> list[Tensor]:
                return [-update for update in updates]

        return chain(Reversed(), transform)


class Leaving(thrifty.Technique):
    """A model that keeps what was put on it when it is finished."""

    stage, numerics = thrifty.Stage.ARCHITECTURE, DIFFERENT

    def model(self, model: nn.Module) -> nn.Module:
        model.left = nn.Parameter(torch.zeros(2))
        model.register_forward_hook(lambda module, args, output: replace_logits(output, module.left.sum()))
        return model


def replace_logits(output: Any, extra: Tensor) -> Any:
    return output + extra if isinstance(output, Tensor) else replace(output, hidden=output.hidden + extra)


class HalfByHand(thrifty.Technique):
    """A technique that says it works in an own loop, but does nothing there."""

    stage, numerics = thrifty.Stage.OBJECTIVE, DIFFERENT

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def objective(self, objective: Objective) -> Objective:
        return Scaled(objective)

    def model(self, model: nn.Module) -> nn.Module:
        return model


class Ordered(thrifty.Technique):
    """Examples that depend on what was read before."""

    stage, numerics = thrifty.Stage.SOURCE, DIFFERENT

    def batches(self, source: BatchSource) -> BatchSource:
        class Counting(BatchSource):
            batch, reads = source.batch, 0

            def rows(self, step: int, start: int, stop: int) -> Batch:
                self.reads += 1
                return source.rows(self.reads, start, stop)

        return Counting()


BROKEN: dict[type[thrifty.Technique], str] = {
    Unstaged: "stage and numerics", Tolerant: "stage and numerics", Unequal: "settings", Unlearned: "claims",
    Renaming: "parameter names", NotExact: "exact", Forgetful: "resume", Unlearning: "it learns", Leaving: "export",
    HalfByHand: "own loop", Ordered: "data by step",
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_promise_is_named_with_its_fix(kind: type[thrifty.Technique]) -> None:
    with pytest.raises(IntegrityError) as found:
        thrifty.testing.check_technique(kind)
    assert f"{BROKEN[kind]}: " in str(found.value) and "fix: " in str(found.value), found.value


class Picky(thrifty.Technique):
    stage, numerics = thrifty.Stage.ARCHITECTURE, DIFFERENT

    def model(self, model: nn.Module) -> nn.Module:
        raise RefusedError("picky needs images", fix="use another")


def test_techniques_for_other_models_report_what_was_skipped() -> None:
    report = thrifty.testing.check_technique(Picky)
    assert any("picky needs images" in each.measured for each in report.verdicts if each.outcome == "not applicable")


def test_unknown_settings_and_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown key 'halved.rat'"):
        thrifty.testing.check_technique(Halved, rat=1)
    with pytest.raises(UsageError):
        thrifty.testing.check_technique("clippy")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "sparsity.rigl", "optimizers.lion", "memory.recompute", "ema"])
def test_those_of_the_toolkit_keep_it(name: str) -> None:
    from thrifty import techniques

    thrifty.testing.check_technique(technique(techniques.find(name).name))
