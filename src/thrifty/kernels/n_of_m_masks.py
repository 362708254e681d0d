"""N:M sparsity: at most n of every m neighbors along the last dim are nonzero.

This module contains masks, their updates, decay of masked weights, and an N:M sparse estimate of gradients. A weight
(out, in) is masked along its inputs, the dim that matmuls sum, as hardware for 2:4 matmuls requires.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.deterministic_cumsum import running_sums
from thrifty.kernels.transposable_masks import transposable_mask, transposable_patterns


@dataclass(frozen=True)
class NOfMPattern:
    """N:M pattern of masks.

    Raises UsageError if the pattern keeps all or no weights, and RefusedError if its masks cannot be searched.
    """

    n: int = 2
    m: int = 4
    transposable: bool = False
    """True if the pattern holds along both dims."""

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UsageError(
                f"the pattern {self} keeps no weights or all weights", fix="choose n from 1 to m - 1, such as 2:4"
            )
        if self.transposable:
            transposable_patterns(self.n, self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def mask(self, weight: Tensor) -> Tensor:
        """Return the mask of a weight (out, in) with the largest kept sum of magnitudes."""
        return transposable_mask(weight, self.n, self.m) if self.transposable else n_of_m_mask(weight, self.n, self.m)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if weights of shape (out, in) divide into whole groups."""
        return shape[1] % self.m == 0 and (not self.transposable or shape[0] % self.m == 0)

    def admits(self, mask: Tensor) -> Tensor:
        """Return a boolean scalar: True if a mask (out, in) keeps at most what the pattern allows."""
        orientations = (mask, mask.T) if self.transposable else (mask,)
        return torch.stack([(each.unflatten(-1, (-1, self.m)).sum(-1) <= self.n).all() for each in orientations]).all()


def n_of_m_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """Return the mask (…, k) that keeps the n largest magnitudes of each m neighbors along the last dim. k must be a
    multiple of m. Among equal magnitudes the first are kept, on every device.
    """
    groups = weight.detach().abs().unflatten(-1, (-1, m)).unbind(-1)
    # compares all pairs, which is several times faster than sorting rows of four
    lost = [torch.zeros(groups[0].shape, dtype=torch.int8, device=weight.device) for _ in groups]
    for later in range(m):
        for earlier in range(later):
            wins = groups[earlier] >= groups[later]
            lost[later] += wins
            lost[earlier] += ~wins
    return torch.stack([count < n for count in lost], -1).flatten(-2)


def add_masked_decay(gradient: Tensor, weight: Tensor, mask: Tensor, decay: float) -> None:
    """Add decay · (1 - mask) · weight to the gradient in place. All tensors have the same shape.

    Masked weights shrink, so they are less likely to become active again (SR-STE, Zhou et al. 2021).
    """
    gradient.addcmul_(weight, (~mask).to(weight.dtype), value=decay)


def keep_probabilities(groups: Tensor, n: int) -> Tensor:
    """Return the probability of keeping each element of groups (m, …), for the unbiased estimate of minimum
    variance.

    The probabilities are min(1, c · |element|). The factor c makes them sum to n, or to the number of nonzero elements
    if that is smaller.
    """
    magnitude = groups.abs()
    certain = torch.zeros_like(magnitude, dtype=torch.bool)
    probability = magnitude
    for _ in range(n + 1):
        room = n - certain.sum(0)
        rest = magnitude.masked_fill(certain, 0.0)
        # clamped to the smallest normal number, so that a group of zeros gets probability 0
        probability = (rest * room).div_(rest.sum(0).clamp_min_(torch.finfo(rest.dtype).tiny))
        certain = certain | (probability >= 1)
    return probability.masked_fill_(certain, 1.0)


def unbiased_estimate(
    numbers: Tensor, n: int, m: int, dim: int = -1, generator: torch.Generator | None = None
) -> Tensor:
    """Return a random N:M sparse estimate of `numbers` along a dim, in their shape. The estimate is unbiased with
    minimum variance.

    Chmiel et al. 2022 (arXiv 2203.10991). The last group may be smaller. An unbiased estimate that keeps element x with
    probability p has a second moment of at least x² / p. The value x / p reaches this bound. Under Σ p ≤ n and p ≤ 1,
    the sum of second moments is minimal if p is proportional to |x|, capped at 1. One uniform random number u per group
    then selects the elements at which the running sum of p passes u plus an integer. These are exactly n elements if Σ
    p = n. A group with a non-finite element becomes NaN, so that it is noticed.
    """
    entries = numbers.float().movedim(dim, 0)
    length = len(entries)
    if length % m:
        entries = torch.cat([entries, entries.new_zeros(-length % m, *entries.shape[1:])])
    groups = entries.unflatten(0, (-1, m)).transpose(0, 1).contiguous()
    p = keep_probabilities(groups, n)
    start = torch.rand(groups.shape[1:], generator=generator, device=groups.device)
    passed = (running_sums(p, 0).clamp_max_(n) - start).ceil_()
    kept = passed > torch.cat([torch.zeros_like(passed[:1]), passed[:-1]])
    estimate = (groups / p).masked_fill_(~kept, 0.0)
    estimate.masked_fill_(~groups.sum(0).isfinite(), torch.nan)
    return estimate.transpose(0, 1).flatten(0, 1)[:length].movedim(0, dim).to(numbers.dtype)
