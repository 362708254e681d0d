"""Gradient noise scale (McCandlish et al. 2018): measure the largest batch size that still pays off.

Paper       McCandlish et al. 2018, An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1.
Promise     The metric "noise_scale" in examples: B = tr Σ / |G|², with the mean G and the covariance Σ of per-example
            gradients. At batch size B a run needs twice the minimum number of steps and twice the minimum number of
            examples.
Use         run = thrifty.train(model, texts, held_out=held_out, techniques=["noise_scale"], budget="2000 steps")
Start with  `noise_scale:every=4`. Judge the curve, not one value, because the noise scale grows as the loss falls.
Cost        One step in `every` processes the batch in two halves and holds the gradients of both in memory. Across
            ranks the gradients of each half are all-reduced separately.
Avoid       Exact use of the value with optimizers that rescale gradients, because the noise scale of their updates
            differs, usually by little.
Does not    Change the gradient beyond rounding from a changed summation order.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.setting_bounds import Positive, Probability
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import global_norm

MOST = 10.0
"""Maximum squared gradient norm, relative to the running average."""


def signal_and_noise(small: float, big: float, small_batch: float, big_batch: float) -> tuple[float, float]:
    """Return unbiased estimates of the gradient's signal and noise.

    The signal is |G|², the squared norm of the true gradient. The noise is tr Σ, the gradient variance per example.
    `small` and `big` are squared norms of mean gradients over batches of two sizes. The expectation of each is |G|² +
    tr Σ / (its batch size) (McCandlish et al. 2018, appendix A.1).
    """
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    noise = (small - big) / (1 / small_batch - 1 / big_batch)
    return signal, noise


def clamp_signal_and_noise(signal: float, noise: float, batch: float, usual: float) -> tuple[float, float]:
    """Scale signal and noise down so that signal + noise / batch is at most `MOST` times the `usual` value.

    The sum signal + noise / batch is the expected squared gradient norm of a batch.
    """
    factor = min(1.0, MOST * usual / size) if (size := signal + noise / batch) > 0 else 1.0
    return factor * signal, factor * noise


def measured_in_halves(
    backward: Backward, model: nn.Module, objective: Objective, batch: Batch, times: int = 1
) -> tuple[BackwardResult, tuple[float, float]]:
    """Run the backward pass over each half of the batch. Return the result, and signal and noise as in
    `signal_and_noise`.

    Afterwards `.grad` has the gradients of the whole batch. `times` is the number of ranks. All ranks have the same
    number of examples. The small batch size is half of the batch. If the halves differ by one example, the small batch
    size is the harmonic mean of both sizes, which keeps the estimates unbiased.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole, half = len(batch), len(batch) // 2
    first = backward(model, objective, batch.rows(0, half))
    first_gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    second = backward(model, objective, batch.rows(half, whole))
    halves = (half, first_gradients), (whole - half, [parameter.grad for parameter in parameters])
    small = sum(squared_norm(gradients) * (whole / rows) ** 2 for rows, gradients in halves) / 2
    for parameter, gradient in zip(parameters, first_gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    big = squared_norm([parameter.grad for parameter in parameters])
    small_batch = 2 / (1 / half + 1 / (whole - half))
    # gradients of a weighted loss are the mean gradient times the sum of the weights
    total = times * float(mean_over_ranks(batch.weight.sum()))
    signal, noise = signal_and_noise(small, big, times * small_batch, times * whole)
    return first + second, (signal / total**2, noise / total**2)


def squared_norm(gradients: Sequence[Tensor | None]) -> float:
    return float(global_norm([gradient for gradient in gradients if gradient is not None])) ** 2


class NoiseScaleBackward:
    """A backward pass that measures |G|² (signal) and tr Σ (noise) at one call in `every`.

    `state` has the number of calls and the running averages of signal and noise. Both averages start at zero, so their
    ratio needs no bias correction.
    """

    def __init__(self, inner: Backward, every: int, momentum: float):
        self.inner, self.every, self.momentum = inner, every, momentum
        self.state = {"calls": torch.zeros((), dtype=torch.int64), "signal": torch.zeros(()), "noise": torch.zeros(())}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        is_due = int(self.state["calls"]) % self.every == 0
        self.state["calls"].add_(1)
        if not is_due:
            return self.inner(model, objective, batch)
        if len(batch) < 2:
            raise RefusedError(
                f"a batch of {len(batch)} example per rank cannot be split into two halves",
                fix="--set data.batch=8",
            )
        outcome, (signal, noise) = measured_in_halves(self.inner, model, objective, batch, axis("data").size)
        if math.isfinite(signal) and math.isfinite(noise):  # the loop skips a step without finite gradients
            examples = axis("data").size * len(batch)
            if (usual := self.usual(examples)) > 0:
                signal, noise = clamp_signal_and_noise(signal, noise, examples, usual)
            for name, value in (("signal", signal), ("noise", noise)):
                self.state[name].mul_(self.momentum).add_((1 - self.momentum) * value)
        signal, noise = float(self.state["signal"]), float(self.state["noise"])
        notes = {"noise_scale": noise / signal} if signal > 0 else {}
        return replace(outcome, notes=outcome.notes | notes)

    def usual(self, batch: int) -> float:
        """Return the squared gradient norm that earlier measurements predict for a batch; 0 before the first
        measurement."""
        measured = -(-(int(self.state["calls"]) - 1) // self.every)
        share = 1 - self.momentum**measured  # the averages start at zero
        return (float(self.state["signal"]) + float(self.state["noise"]) / batch) / share if share > 0 else 0.0


class NoiseScale(Technique):
    """tr Σ is the variance of the gradient of one example. |G|² is the squared norm of the mean gradient. The noise
    scale is B = tr Σ / |G|². If the batch is well below B, doubling the batch nearly halves the number of required
    steps. If the batch is well above B, doubling saves few steps. B is computed from two running averages, because
    single measurements are noisy and may be negative.

    Differs from the paper: a squared gradient norm above 10 times the running average counts as 10 times the average.
    Without this limit, one gradient 1000 times too long would dominate about 500 measurements at a momentum of 0.98.
    The first measurement is not limited.
    """

    stage, numerics, tolerance = Stage.MEASURE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.HALF_BATCH_GRADIENTS})

    every: Positive = 4
    """Steps between measurements."""
    momentum: Probability = 0.98
    """Momentum of the running averages, per measurement."""

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "the gradient of a loss that compares all examples is not the sum over two halves of the batch",
                fix=f"--without {self.name}",
            )
        return objective

    def backward(self, backward: Backward) -> Backward:
        return NoiseScaleBackward(backward, self.every, self.momentum)

    def footprint(self, footprint: Footprint) -> Footprint:
        # a measured step: half of the activations, and the gradients of both halves
        counted = max(footprint.gradients, footprint.activations)
        return footprint.add(temporary=max(2 * footprint.gradients - counted, 0))
