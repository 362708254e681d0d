"""Verdicts of 200 comparisons of equal variants, and of 200 comparisons with a worse variant.

Each comparison trains 16 digit classifiers. All classifiers are trained in parallel, as slices of the same tensors.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from thrifty.comparing.variant_verdict import judge
from thrifty.data.images.digits import DigitImages

PAIRS, TRIALS, STEPS, BATCH = 8, 200, 30, 16


def held_out_losses(runs: int, seed: int, rate: float = 0.5, steps: Tensor | int = STEPS) -> Tensor:
    """Return the losses (runs,) of linear classifiers. Each has its own initialization, data order and number of steps
    (runs,). The learning rate decays."""
    steps = torch.as_tensor(steps).expand(runs)[:, None, None]
    (images, labels), (tests, truths) = (
        (results.images.flatten(1), results.labels) for results in (DigitImages("train"), DigitImages("test"))
    )
    tests, truths = tests[:128], truths[:128]
    random = torch.Generator().manual_seed(seed)
    weights = (0.1 * torch.randn(runs, images.shape[1], 10, generator=random)).requires_grad_()
    for step in range(int(steps.max())):
        batch_rows = torch.randint(len(images), (runs, BATCH), generator=random)
        scores = torch.einsum("rbi,rio->rbo", images[batch_rows], weights)
        loss = cross_entropy(scores.flatten(0, 1), labels[batch_rows].flatten(), reduction="sum") / BATCH
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            weights -= rate * (1 - step / steps).clamp(min=0) * gradient
    scores = torch.einsum("bi,rio->rob", tests, weights.detach())
    return cross_entropy(scores, truths.expand(runs, -1), reduction="none").mean(1)


def verdicts(baseline: Tensor, variant: Tensor) -> list[str]:
    trials = zip(baseline.reshape(TRIALS, PAIRS).tolist(), variant.reshape(TRIALS, PAIRS).tolist(), strict=True)
    return [judge(first, second).verdict for first, second in trials]


@pytest.mark.slow
def test_95_percent_of_equal_trials_report_no_difference() -> None:
    results = verdicts(held_out_losses(TRIALS * PAIRS, seed=1), held_out_losses(TRIALS * PAIRS, seed=2))
    assert results.count("no difference") >= 0.95 * TRIALS


@pytest.mark.slow
def test_far_too_small_learning_rate_is_found_worse() -> None:
    results = verdicts(held_out_losses(TRIALS * PAIRS, seed=1), held_out_losses(TRIALS * PAIRS, seed=2, rate=0.1))
    assert results.count("worse") >= 0.95 * TRIALS and "better" not in results


@pytest.mark.slow
def test_shared_pilot_error_is_no_finding() -> None:
    """Numbers of steps come from step times with 4 % deviation. The used budget is known to 0.3 %."""
    random = torch.Generator().manual_seed(3)
    errors = torch.randn(TRIALS, generator=random) * 0.04
    rounded = (STEPS * (1 + errors)).round().long()
    baseline = held_out_losses(TRIALS * PAIRS, seed=1)
    variant = held_out_losses(TRIALS * PAIRS, seed=2, steps=rounded.repeat_interleave(PAIRS))
    more = held_out_losses(TRIALS * PAIRS, seed=2, steps=2 * STEPS)
    slope = float(baseline.mean() - more.mean()) / math.log(2)
    used = rounded / STEPS * (1 + 0.003 * torch.randn(TRIALS, generator=random))
    trials = list(
        zip(
            baseline.view(TRIALS, PAIRS).tolist(),
            variant.view(TRIALS, PAIRS).tolist(),
            used.tolist(),
            strict=True,
        )
    )
    results = [judge(first, second, used=fraction, slope=slope).verdict for first, second, fraction in trials]
    assert rounded.unique().numel() > 3 and slope > 0
    assert results.count("better") + results.count("worse") <= 0.03 * TRIALS
