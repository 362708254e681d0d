"""GraSP: Hessian-vector products against gradient differences, and scoring steps."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import advance, losses, plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.backward import Backward, BackwardResult, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.objective import Objective, Prediction
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.large_batch.gradient_accumulation import accumulated
from thrifty.techniques.sparsity.grasp import Grasp, grasp_scores, hessian_gradient


class Doubles(Objective):
    """Cross-entropy of classes in the model's precision."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=model(batch["inputs"]))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return F.cross_entropy(prediction.logits, batch["labels"], reduction="none")


def small(dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 4)).double()
    inputs, labels = torch.randn(11, 5, dtype=torch.float64), torch.arange(11) % 4
    return model, Batch({"inputs": inputs, "labels": labels}, torch.rand(11) / 11)


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def gradients_at(
    model: nn.Module, batch: Batch, temperature: float, moved: list[Tensor], backward: Backward
) -> list[Tensor]:
    """Return the gradient of the tempered loss at shifted matrices, with the random values of the first pass."""
    objective = Doubles()
    objective.losses = lambda prediction, batch: F.cross_entropy(  # type: ignore[method-assign]
        prediction.logits / temperature, batch["labels"], reduction="none"
    )
    with torch.no_grad():
        for weight, by in zip(matrices(model), moved, strict=True):
            weight.add_(by)
    model.zero_grad()
    torch.manual_seed(7)
    backward(model, objective, batch)
    with torch.no_grad():
        for weight, by in zip(matrices(model), moved, strict=True):
            weight.sub_(by)
    return [weight.grad.clone() for weight in matrices(model) if weight.grad is not None]


@pytest.mark.parametrize("temperature", [1.0, 200.0])
@pytest.mark.parametrize("backward", [plain_backward, accumulated(plain_backward, 3)], ids=["whole", "in parts"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_scoring_gradient_is_the_hessian_vector_product(temperature: float, backward: Backward, dropout: float) -> None:
    model, batch = small(dropout)
    still = [torch.zeros_like(weight) for weight in matrices(model)]
    gradient = gradients_at(model, batch, temperature, still, backward)
    size = 1e-4 / max(float(g.abs().max()) for g in gradient)
    ahead, behind = (
        gradients_at(model, batch, temperature, [sign * size * g for g in gradient], backward) for sign in (1, -1)
    )
    model.zero_grad()
    torch.manual_seed(7)
    outcome = hessian_gradient(backward, model, Doubles(), batch, matrices(model), temperature)
    for weight, plus, minus in zip(matrices(model), ahead, behind, strict=True):
        torch.testing.assert_close(weight.grad, (plus - minus) / (2 * size), rtol=1e-5, atol=1e-12)
    torch.manual_seed(7)
    model.zero_grad()
    assert float(outcome.loss) == pytest.approx(float(backward(model, Doubles(), batch).loss))


def test_largest_score_reduces_the_gradient_norm_most() -> None:
    """Scores rank weights by the decrease of the squared gradient norm when they shrink."""
    model, batch = small()
    weights = matrices(model)
    hessian_gradient(plain_backward, model, Doubles(), batch, weights, 1.0)
    scores = [grasp_scores(weight.detach(), weight.grad) for weight in weights if weight.grad is not None]

    def norm(shrunk: int, place: int, by: float) -> float:
        moved = [torch.zeros_like(weight) for weight in weights]
        moved[shrunk].view(-1)[place] = -by * weights[shrunk].detach().view(-1)[place]
        return sum(float(g.square().sum()) for g in gradients_at(model, batch, 1.0, moved, plain_backward))

    for index, score in enumerate(scores):
        for place in range(0, score.numel(), 5):
            lost = (norm(index, place, -1e-5) - norm(index, place, 1e-5)) / 2e-5
            assert 2 * float(score.view(-1)[place]) == pytest.approx(lost, rel=1e-4, abs=1e-9)


def test_largest_signed_scores_are_kept() -> None:
    model, batch = small()
    sparse = Grasp(density=0.3, where="weight", temperature=1.0)
    optimizer = TransformOptimizer(model.named_parameters(), sparse.update(GradientTransform()))
    sparse.backward(plain_backward)(model, Doubles(), batch)
    scores = torch.cat([(weight.detach() * weight.grad).flatten() for weight in matrices(model)])  # type: ignore[operator]
    optimizer.step()
    kept = torch.cat([mask.flatten() for mask in optimizer.slots["masks.mask"]])
    assert int(kept.sum()) == round(0.3 * len(scores))
    assert scores[kept].min() >= scores[~kept].max()
    assert scores[~kept].min() < 0 < -float(scores.min())  # an absolute value would keep others
    assert not torch.equal(kept, scores.abs() >= scores.abs().sort(descending=True).values[int(kept.sum()) - 1])


LN_256 = math.log(256)


def scored(*others: str, **model: object) -> dict[str, Tensor]:
    run = compose(plain_run(**model), with_optimizer([technique("sparsity.grasp"), *map(technique, others)]), 4)  # type: ignore[arg-type]
    state = run.start()
    (record,) = advance(run, state, 1)
    assert losses([record]) == pytest.approx([LN_256], rel=0.1)  # the loss of the undivided logits
    return {name: mask.clone() for name, mask in masks_in(state).items()}


@pytest.mark.parametrize(
    ("other", "least"),
    [
        ("large_batch.gradient_accumulation", 0.999), ("memory.recompute", 0.999), ("measure.noise_scale", 0.999),
        ("losses.z_loss", 0.98), ("precision.mixed", 0.9),
    ],
)  # fmt: skip
def test_masks_are_equal_over_micro_batches_and_ranks(other: str, least: float) -> None:
    plain, found = scored(), scored(other)
    same = sum(int((plain[name] == found[name]).sum()) for name in plain)
    assert same / sum(mask.numel() for mask in plain.values()) >= least


@pytest.mark.parametrize(
    "other", ["compile", "attention.tiled", "precision.float8", "memory.compress_activations", "parallelism.shard"]
)
def test_missing_second_derivatives_are_refused(other: str) -> None:
    with pytest.raises(UsageError, match=r"sparsity\.grasp and .* cannot be combined"):
        compose(plain_run(), with_optimizer([technique("sparsity.grasp"), technique(other)]), 2)


def test_overflowed_step_is_not_scored() -> None:
    run = compose(plain_run(), with_optimizer([technique("sparsity.grasp")]), 4)
    state = run.start()
    assert state.model is not None
    weight = state.model.blocks[0].mlp.up.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    (record,) = advance(run, state, 1)
    assert record.skipped and int(state.techniques["sparsity.grasp"]["scored"]) == 0
    with torch.no_grad():
        weight.copy_(kept)
    advance(run, state, 2)
    assert int(state.techniques["sparsity.grasp"]["scored"]) == 1
    run.verify(state)
    state.techniques["sparsity.grasp"]["scored"].zero_()  # as in a fork of a run without scoring
    with pytest.raises(IntegrityError, match="0 of the first 1 steps were scored"):
        run.verify(state)


@pytest.mark.parametrize("overflowing", [1, 2])
def test_overflow_of_either_pass_is_handled(overflowing: int) -> None:
    calls = 0

    def scaled(*args: object) -> BackwardResult:
        nonlocal calls
        calls += 1
        return replace(plain_backward(*args), overflow_handled=calls == overflowing)  # type: ignore[arg-type]

    model, batch = small()
    assert hessian_gradient(scaled, model, Doubles(), batch, matrices(model), 1.0).overflow_handled


def test_only_scoring_steps_run_two_passes() -> None:
    calls = []

    def counted(inner: Callable) -> Callable:
        def backward(*args: object) -> object:
            calls.append(1)
            return inner(*args)

        return backward

    model, batch = small()
    backward = Grasp(where="weight", scoring_steps=2).backward(counted(plain_backward))
    for expected in (2, 4, 5, 6):
        model.zero_grad()
        backward(model, Doubles(), batch)
        assert len(calls) == expected
