"""Plain references of kernels: the same by loops or by dense products, for tests alone."""

import heapq

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.kernels.float8 import Float8Format
from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern
from thrifty.kernels.sparse_attention.block_grid import NONE, BlockGrid
from thrifty.kernels.sparse_attention.visibility import VisibilityRule


def greedy_scores_reference(query: Tensor, keys: Tensor, rounds: int) -> Tensor:
    """The paper's search for one query (k,) over keys (n, k), with a heap for each end of the sorted columns: the
    greedy score of each key, (n,) in float64.

    In each round the largest product that is left is added to its key's score if it is positive; then the smallest, if
    negative, unless the sum of all that was taken is negative by now.
    """
    products = (query * keys).double()
    ends = []
    for sign in (-1, 1):  # heapq gives the smallest
        columns = [sorted((sign * products[:, c]).tolist()) for c in range(keys.shape[1])]
        rows = [(sign * products[:, c]).argsort(stable=True).tolist() for c in range(keys.shape[1])]
        heap = [(column[0], c, 0) for c, column in enumerate(columns)]
        heapq.heapify(heap)
        ends.append((heap, columns, rows))
    scores, total = torch.zeros(len(keys), dtype=torch.float64), 0.0
    for _ in range(rounds):
        for sign, (heap, columns, rows) in zip((-1, 1), ends, strict=True):
            if not heap or (sign == 1 and total < 0):
                continue
            value, c, at = heapq.heappop(heap)
            total += sign * value
            if value < 0:  # positive at the upper end, negative at the lower one
                scores[rows[c][at]] += sign * value
            if at + 1 < len(keys):
                heapq.heappush(heap, (columns[c][at + 1], c, at + 1))
    return scores


def hadamard_reference(x: Tensor) -> Tensor:
    """x H along the last dim, H the Hadamard matrix of ±1 in Sylvester's order, by sums and differences."""
    n, half = x.shape[-1], 1
    while half < n:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x


def add_low_rank_reference(result: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """result + scale · x Aᵀ Bᵀ for result (..., out), x (..., in), A (rank, in), B (out, rank)."""
    return result + F.linear(F.linear(x, a), b) * scale


def spmm_reference(x: Tensor, values: Tensor, pattern: SparsityPattern, bias: Tensor | None = None) -> Tensor:
    """`spmm` by a dense product."""
    return F.linear(x, pattern.place(values), bias)


def sddmm_reference(left: Tensor, right: Tensor, pattern: SparsityPattern) -> Tensor:
    """`sddmm` by a dense product."""
    return pattern.pick(left.T @ right)


def round_reference(numbers: Tensor, format: Float8Format) -> Tensor:
    """Return the values of `cast` for scaled values, by arithmetic in float64 instead of torch's dtypes."""
    exact = numbers.double()
    exponent = torch.frexp(exact).exponent - 1
    spacing = torch.ldexp(torch.ones_like(exact), exponent.clamp(min=format.least_exponent) - format.mantissa_bits)
    rounded = ((exact / spacing).round() * spacing).clamp(-format.largest, format.largest)
    return torch.where(exact.isfinite(), rounded, exact if format.has_infinity else torch.nan)


def kept_attention_reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None = None) -> Tensor:
    """Softmax attention of q (b, h, t, k) over those keys and values (b, g, s, k) that `keep` has, boolean and
    broadcast to (b, h, t, s). A query that keeps nothing gets zeros."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    keep = keep.expand_as(scores)
    some = keep.any(-1, keepdim=True)
    # a row without keys would have no largest score: it sees all, and is zeroed
    return scores.masked_fill(~keep & some, float("-inf")).softmax(-1).masked_fill(~some, 0.0) @ v


def window_mask(tokens: int, window: int, first: int = 0, causal: bool = False) -> Tensor:
    """A token sees `window` tokens up to itself, as many from itself on unless `causal`, and the `first` ones, which
    see all (Beltagy et al. 2020, Longformer, arXiv 2004.05150)."""
    place = torch.arange(tokens)
    return VisibilityRule(causal, window, first).visible(place[:, None], place[None, :])


def pairs_of(grid: BlockGrid, queries: int, keys: int) -> Tensor:
    """The pairs that a grid keeps, (b or 1, h or 1, t, s)."""
    kept = grid.codes != NONE
    wide = kept.repeat_interleave(grid.block, -1).repeat_interleave(grid.block, -2)[..., :queries, :keys]
    at = torch.arange(queries, device=wide.device)[:, None], torch.arange(keys, device=wide.device)[None, :]
    return wide & grid.sight.visible(*at)
