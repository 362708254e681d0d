"""Gradient noise scale, on gradients with known mean and covariance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import losses, plain_run, run_through, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.step_footprint import CountedPasses
from thrifty.core.backward import Backward, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Objective, Prediction
from thrifty.techniques.measure.noise_scale import (
    NoiseScale,
    NoiseScaleBackward,
    clamp_signal_and_noise,
    measured_in_halves,
    signal_and_noise,
)
from thrifty.techniques.optimizers.adamw import adamw

MEAN = torch.tensor([0.5, -0.25, 0.0, 1.0, 0.0, 0.25], dtype=torch.float64)
DEVIATION = torch.tensor([2.0, 1.0, 0.5, 3.0, 1.0, 0.1], dtype=torch.float64)
SIGNAL, NOISE = float(MEAN.square().sum()), float(DEVIATION.square().sum())


@given(
    signal=some.floats(1e-3, 1e3), noise=some.floats(1e-3, 1e3), small=some.integers(1, 50), more=some.integers(1, 500)
)
def test_expected_norms_yield_signal_and_noise(signal: float, noise: float, small: int, more: int) -> None:
    big = small + more
    found = signal_and_noise(signal + noise / small, signal + noise / big, small, big)
    assert found == pytest.approx((signal, noise), rel=1e-5)


class Weights(nn.Module):
    """A vector in two parameters, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


class Projected(Objective):
    """An objective whose loss is the projection of an example on the weights; its gradient is the example."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=batch["x"] @ torch.cat([model.first, model.second]))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits


def drawn(rows: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = MEAN + DEVIATION * torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return Batch({"x": x}, torch.full((rows,), 1 / rows, dtype=torch.float64))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_estimates_are_unbiased(rows: int) -> None:
    model = Weights()
    found = []
    for seed in range(3000):
        model.zero_grad()
        _, pair = measured_in_halves(plain_backward, model, Projected(), drawn(rows, seed))
        found.append(pair)
    signal, noise = torch.tensor(found, dtype=torch.float64).unbind(1)
    for values, wanted in ((signal, SIGNAL), (noise, NOISE)):
        assert abs(float(values.mean()) - wanted) < 4 * float(values.std()) / math.sqrt(len(values))
        assert float(values.std()) / math.sqrt(len(values)) < 0.2 * wanted


@pytest.mark.parametrize("rows", [2, 7])
def test_gradient_and_loss_equal_the_whole_batch(rows: int) -> None:
    whole, halved, batch = Weights(), Weights(), drawn(rows, 0)
    expected = plain_backward(whole, Projected(), batch)
    outcome, _ = measured_in_halves(plain_backward, halved, Projected(), batch)
    assert float(outcome.loss) == pytest.approx(float(expected.loss))
    for found, wanted in ((halved.first, whole.first), (halved.second, whole.second)):
        torch.testing.assert_close(found.grad, wanted.grad)
    assert halved.frozen.grad is None


def test_note_is_the_ratio_of_running_averages() -> None:
    measuring, model, signal, noise, scales = NoiseScaleBackward(plain_backward, 1, 0.98), Weights(), 0.0, 0.0, []
    for seed in range(400):
        model.zero_grad()
        _, found = measured_in_halves(plain_backward, model, Projected(), drawn(64, seed))
        model.zero_grad()
        notes = measuring(model, Projected(), drawn(64, seed)).notes
        signal, noise = 0.98 * signal + 0.02 * found[0], 0.98 * noise + 0.02 * found[1]
        assert notes["noise_scale"] == pytest.approx(noise / signal, rel=1e-4)
        scales.append(notes["noise_scale"])
    assert sum(scales[100:]) / 300 == pytest.approx(NOISE / SIGNAL, rel=0.1)


def test_one_huge_gradient_is_clamped() -> None:
    """All its examples agree, so that it counts as signal only."""
    huge = Batch({"x": 1000 * MEAN.expand(64, 6)}, torch.full((64,), 1 / 64, dtype=torch.float64))
    scales = []
    for spoiled in (None, 100):
        measuring, model = NoiseScaleBackward(plain_backward, 1, 0.98), Weights()
        for seed in range(200):
            model.zero_grad()
            notes = measuring(model, Projected(), huge if seed == spoiled else drawn(64, seed)).notes
        scales.append(notes["noise_scale"])
    assert scales[1] == pytest.approx(scales[0], rel=0.1)


def test_first_and_usual_measurements_are_not_clamped() -> None:
    assert clamp_signal_and_noise(3.0, 8.0, 4, usual=0.5) == (3.0, 8.0)
    assert clamp_signal_and_noise(300.0, 800.0, 4, usual=5.0) == pytest.approx((30.0, 80.0))
    assert clamp_signal_and_noise(-1.0, 2.0, 4, usual=0.01) == (-1.0, 2.0)
    measuring = NoiseScaleBackward(plain_backward, 3, 0.9)
    assert measuring.usual(8) == 0.0
    measuring.state["signal"].fill_(1 - 0.9**2)
    for calls in (5, 6, 7):  # two measurements, of calls 1 and 4, precede calls 5 to 7
        measuring.state["calls"].fill_(calls)
        assert measuring.usual(8) == pytest.approx(1.0)


def test_measures_only_every_n_steps() -> None:
    chosen = with_optimizer([technique("measure.noise_scale", every=3)])
    plain, _ = run_through(plain_run(batch=16), with_optimizer([]), 8)
    records, state = run_through(plain_run(batch=16), chosen, 8)
    assert [step for step, record in enumerate(records) if record.notes] == [0, 3, 6]
    assert state.tensors()["techniques/measure.noise_scale/calls"] == 8
    assert losses(records) == pytest.approx(losses(plain), rel=1e-5)


def test_negative_signal_records_no_noise_scale() -> None:
    opposed = Batch({"x": torch.cat([torch.eye(6)[:1], -torch.eye(6)[:1]]).double()}, torch.full((2,), 0.5).double())
    measuring = NoiseScaleBackward(plain_backward, 1, 0.5)
    assert measuring(Weights(), Projected(), opposed).notes == {}
    assert float(measuring.state["signal"]) < 0


def test_non_finite_step_does_not_change_averages() -> None:
    measuring = NoiseScaleBackward(plain_backward, 1, 0.5)
    first = measuring(Weights(), Projected(), drawn(8, 0)).notes
    broken = drawn(8, 1)
    broken["x"][0] = float("nan")
    assert measuring(Weights(), Projected(), broken).notes == first


def test_batch_of_one_is_refused() -> None:
    with pytest.raises(RefusedError, match="cannot be split into two halves"):
        NoiseScaleBackward(plain_backward, 1, 0.5)(Weights(), Projected(), drawn(1, 0))


@pytest.mark.parametrize(("batch", "is_more"), [(2, True), (64, False)])
def test_measured_step_memory_is_predicted(batch: int, is_more: bool) -> None:
    plain = plain_run(batch=batch)

    def counted(backward: Backward) -> Footprint:
        passes = CountedPasses(plain.build(), plain.objective, backward, plain.source.at(0))
        return passes.followed_by(adamw(), 1)

    unmeasured, measured = counted(plain_backward), counted(NoiseScaleBackward(plain_backward, 1, 0.9))
    claimed = NoiseScale().footprint(unmeasured)
    assert (claimed.memory > unmeasured.memory) == is_more
    assert measured.memory <= 1.02 * claimed.memory
