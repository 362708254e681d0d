"""ELSA filter: keys with a small angle to the query. Angles are estimated from sign hashes of a fast orthogonal
projection.

Paper: Ham et al. 2021, ELSA: Hardware-Software Co-design for Efficient, Lightweight Self-Attention (ISCA).
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.kernels.attention_filters.keep_masks import exact_scores, heads_of_keys, with_one

PAIRS, PROJECTIONS = 2048, 96
"""Number of random vector pairs per projection, and number of projections. `angle_bias` is a percentile over all pairs.
"""


def factor_sizes(width: int) -> tuple[int, ...]:
    """Return sizes of square matrices whose Kronecker product has size `width`: factors 4 first, then primes."""
    sizes: list[int] = []
    for divisor in (4, *range(2, width + 1)):
        while width % divisor == 0 and width > 1:
            sizes.append(divisor)
            width //= divisor
    return tuple(sizes) or (1,)


def multiplies(sizes: Sequence[int]) -> int:
    """Return the number of multiplications of one projection: 768 for sizes (4, 4, 4), 4096 for the full matrix."""
    return math.prod(sizes) * sum(sizes)


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Return orthonormal rows with the same span as the rows of a matrix (n, n), by modified Gram-Schmidt."""
    rows: list[Tensor] = []
    for row in matrix:
        for done in rows:
            row = row - (row @ done) * done
        rows.append(row / row.norm())
    return torch.stack(rows)


def orthogonal_factors(sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Return random orthogonal matrices of the given sizes, in float64 on the CPU."""
    return [gram_schmidt(torch.randn(n, n, generator=generator, dtype=torch.float64)) for n in sizes]


@cache
def seeded_factors(sizes: tuple[int, ...], seed: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the factors for a seed as Python floats, so that values exist even while only shapes are traced."""
    with _disable_current_modes(), unset_fake_temporarily():
        factors = orthogonal_factors(sizes, torch.Generator().manual_seed(seed))
        return tuple(tuple(map(tuple, factor.tolist())) for factor in factors)


def kronecker_project(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return (A1 ⊗ A2 ⊗ …) x for x (…, k), with one small matmul per factor."""
    sides = [len(factor) for factor in factors]
    y = x.unflatten(-1, sides)
    with torch.autocast(x.device.type, enabled=False):
        for factor in factors:
            y = torch.tensordot(y, factor.to(y), dims=([-len(sides)], [1]))
    return y.flatten(-len(sides))


def signs(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return the hash of vectors (…, k): k signs, 1 or -1."""
    return torch.where(kronecker_project(x, factors) >= 0, 1.0, -1.0).to(x.dtype)


def estimated_angle(query_signs: Tensor, key_signs: Tensor) -> Tensor:
    """Return the estimated angle (π / k) · Hamming distance, (…, t, s), from signs (…, t, k) and (…, s, k)."""
    bits = query_signs.shape[-1]
    return math.pi / bits * (bits - query_signs @ key_signs.mT) / 2


@cache
def angle_bias(sizes: tuple[int, ...], share: float = 0.8, seed: int = 0) -> float:
    """Return the bias of estimated angles in radians: the `share` quantile of the error over pairs of standard normal
    vectors.

    After subtraction of the bias, the estimate is too small for a fraction `share` of the pairs. The bias is 0.127 for
    sizes (4, 4, 4).
    """
    width = math.prod(sizes)
    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        errors = []
        for _ in range(PROJECTIONS):
            factors = orthogonal_factors(sizes, generator)
            x, y = torch.randn(2, PAIRS, width, generator=generator)
            true = torch.cosine_similarity(x, y, dim=-1).clamp(-1, 1).acos()
            hamming = (signs(x, factors) != signs(y, factors)).sum(-1)
            errors.append(math.pi / width * hamming - true)
        return float(torch.cat(errors).quantile(share))


def elsa_similarity(q: Tensor, k: Tensor, factors: Sequence[Tensor], bias: float) -> Tensor:
    """Return |k| · cos(max(0, angle - bias)), (b, h, t, s) in float32, for q (b, h, t, k) and k (b, g, s, k)."""
    q, k = q.float(), heads_of_keys(k, q.shape[1]).float()
    angle = estimated_angle(signs(q, factors), signs(k, factors))
    return k.norm(dim=-1)[:, :, None, :] * (angle - bias).clamp(min=0).cos()


def largest_norm(k: Tensor, heads: int, visible: Tensor) -> Tensor:
    """Return the largest norm of the keys that each query can see, (b, h, 1 or t, 1)."""
    norms = heads_of_keys(k, heads).float().norm(dim=-1)[:, :, None, :]
    return norms.masked_fill(~visible, 0.0).amax(-1, keepdim=True)


def elsa_keep(
    q: Tensor,
    k: Tensor,
    factors: Sequence[Tensor],
    bias: float,
    threshold: float,
    visible: Tensor,
    position_bias: Tensor | None = None,
) -> Tensor:
    """Return a mask (b, h, t, s) of keys with a similarity above threshold · the largest visible norm. A query without
    such a key keeps its most similar key. A bias (b or 1, h or 1, t, s) of the scores is added to the similarity, in
    its unit.
    """
    similarity = elsa_similarity(q, k, factors, bias)
    if position_bias is not None:
        norms = q.float().norm(dim=-1, keepdim=True).clamp(min=1e-20)
        similarity = similarity + position_bias * q.shape[-1] ** 0.5 / norms
    keep = (similarity > threshold * largest_norm(k, q.shape[1], visible)) & visible
    return with_one(keep, similarity, visible)


def threshold_samples(q: Tensor, k: Tensor, p: float, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the threshold that each query requires, (b, h, t).

    Take the keys whose softmax weight is above p / n, for n visible keys. The threshold is their lowest score, divided
    by |q| and the largest |k|. If no weight is above p / n, the highest score is used.
    """
    scores = exact_scores(q, k, bias).masked_fill(~visible, float("-inf"))
    n = visible.sum(-1, keepdim=True)
    enough = scores.softmax(-1) > p / n
    lowest = scores.masked_fill(~enough, float("inf")).amin(-1)
    chosen = torch.where(enough.any(-1), lowest, scores.amax(-1)) * q.shape[-1] ** 0.5
    return chosen / (q.float().norm(dim=-1) * largest_norm(k, q.shape[1], visible)[..., 0]).clamp(min=1e-20)
