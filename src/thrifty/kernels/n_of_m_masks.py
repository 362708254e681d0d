"""N:M sparsity: of every m neighbours along the last dim at most n are not zero. Masks, how they move, what is added to
gradients, and an estimate of gradients that is N:M sparse itself.

A weight (out, in) is masked along its inputs, over which its product sums: that is what units for 2:4 products ask for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.deterministic_cumsum import running_sums
from thrifty.kernels.transposable_masks import transposable_mask, transposable_patterns


@dataclass(frozen=True)
class NOfMPattern:
    """What a mask must look like. Raises UsageError where that leaves no choice, RefusedError where it cannot be
    searched for."""

    n: int = 2
    m: int = 4
    transposable: bool = False
    """Along both dims."""

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise UsageError(f"{self} keeps none or all of its weights", fix="choose n from 1 to m - 1, such as 2:4")
        if self.transposable:
            transposable_patterns(self.n, self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    def mask(self, weight: Tensor) -> Tensor:
        """The mask for a weight (out, in) that keeps the largest sum of magnitudes."""
        return transposable_mask(weight, self.n, self.m) if self.transposable else n_of_m_mask(weight, self.n, self.m)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether weights (out, in) of this shape can be cut into whole groups."""
        return shape[1] % self.m == 0 and (not self.transposable or shape[0] % self.m == 0)

    def admits(self, mask: Tensor) -> Tensor:
        """Whether a mask (out, in) keeps no more than it may; a boolean scalar."""
        ways = (mask, mask.T) if self.transposable else (mask,)
        return torch.stack([(way.unflatten(-1, (-1, self.m)).sum(-1) <= self.n).all() for way in ways]).all()


def n_of_m_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """The mask (…, k) that keeps the n largest magnitudes of each m neighbours along the last dim, a multiple of m. Of
    equal ones the first are kept, on every device."""
    groups = weight.detach().abs().unflatten(-1, (-1, m)).unbind(-1)
    # who is larger is asked of each pair: several times as fast as sorting rows of four
    lost = [torch.zeros(groups[0].shape, dtype=torch.int8, device=weight.device) for _ in groups]
    for later in range(m):
        for earlier in range(later):
            wins = groups[earlier] >= groups[later]
            lost[later] += wins
            lost[earlier] += ~wins
    return torch.stack([count < n for count in lost], -1).flatten(-2)


def add_masked_decay(gradient: Tensor, weight: Tensor, mask: Tensor, decay: float) -> None:
    """Adds decay · (1 - mask) · weight to the gradient, in place; all of one shape. What is masked shrinks, and so
    comes back less easily (SR-STE, Zhou et al. 2021)."""
    gradient.addcmul_(weight, (~mask).to(weight.dtype), value=decay)


def keep_probabilities(groups: Tensor, n: int) -> Tensor:
    """With what probability each number of each group (m, …) is kept by the unbiased estimate of least variance that
    keeps n of them: min(1, c · |number|), where c makes them sum to n (to fewer where fewer are not zero)."""
    magnitude = groups.abs()
    certain = torch.zeros_like(magnitude, dtype=torch.bool)
    share = magnitude
    for _ in range(n + 1):
        room = n - certain.sum(0)
        rest = magnitude.masked_fill(certain, 0.0)
        # the smallest normal number: a group of zeros is 0 of it
        share = (rest * room).div_(rest.sum(0).clamp_min_(torch.finfo(rest.dtype).tiny))
        certain = certain | (share >= 1)
    return share.masked_fill_(certain, 1.0)


def unbiased_estimate(
    numbers: Tensor, n: int, m: int, dim: int = -1, generator: torch.Generator | None = None
) -> Tensor:
    """Numbers of which at most n of each m neighbours along a dim are not zero, drawn so that each has the expectation
    of the given one, with the least sum of variances that allows. The last group may be smaller.

    Chmiel et al. 2022 (arXiv 2203.10991). An unbiased estimate that keeps a number x with probability p has at least
    the second moment x² / p, which x / p has; under Σ p ≤ n and p ≤ 1 the sum of those is least for p in proportion to
    |x|, capped at 1. One uniform number a group then keeps exactly n: places where the running sum of p passes it or
    it plus a whole number. A group with a number that is not finite becomes such numbers, so that nobody misses it.
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
