"""Transposable N:M masks: n of each m along rows and along columns, so that the transpose is N:M sparse too.

A tile of m x m has finitely many patterns, 90 for 2:4. The best pattern keeps the largest sum of magnitudes. One matmul
scores all tiles with all patterns. Hubara et al. 2021 (arXiv 2102.08124) compute such masks approximately. Hu et al.
2024 (arXiv 2404.01847) search the patterns with a convolution.

Patterns keep exactly n elements per row and column, although hardware for 2:4 matmuls would accept fewer. For 2:4, 96
other patterns keep 7 elements and allow no eighth. With these patterns, masks of normal weights kept 70.27 % of the
magnitude instead of 70.23 %. This gain does not justify keeping 7 weights of 16 instead of 8. Greedy tiles, as torch
computes them, kept 69 %. Masks along rows alone keep 74.4 %.
"""

import itertools
from functools import cache

import torch
from torch import Tensor

from thrifty.core.errors import RefusedError

LARGEST_TILE = 4
TILES_AT_ONCE = 4096
"""Number of tiles scored together. With 90 patterns they take 1.5 MB in float32, which fits a cache."""


@cache
def _patterns(n: int, m: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    rows = [tuple(int(i in kept) for i in range(m)) for kept in itertools.combinations(range(m), n)]
    tiles = itertools.product(rows, repeat=m)
    return tuple(tile for tile in tiles if all(sum(column) == n for column in zip(*tile, strict=True)))


def transposable_patterns(n: int, m: int) -> Tensor:
    """Return all tiles (patterns, m, m) of 0 and 1 with n ones per row and column. Raise RefusedError if m is above 4,
    because there are too many tiles.
    """
    if m > LARGEST_TILE:
        raise RefusedError(
            f"transposable {n}:{m} masks are not supported: the search tries all patterns of a tile, 90 for 2:4 but "
            "116,963,796,250 for 4:8",
            fix=f"set m to at most {LARGEST_TILE}; or transposable = false",
        )
    return torch.tensor(_patterns(n, m), dtype=torch.bool)


def transposable_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """Return the mask (r, c) with n of m along both dims and the largest kept sum of |weight|. r and c are multiples of
    m.

    The mask is optimal in each tile, up to the rounding of a sum of n · m magnitudes. Among equal patterns the first is
    chosen.
    """
    rows, columns = weight.shape[0] // m, weight.shape[1] // m
    patterns = transposable_patterns(n, m).to(weight.device)
    magnitude = weight.detach().abs()
    if magnitude.dtype != torch.float64:
        magnitude = magnitude.float()
    tiles = magnitude.view(rows, m, columns, m).transpose(1, 2).reshape(-1, m * m)
    score = patterns.flatten(1).to(tiles.dtype).T
    best = torch.cat([(some @ score).argmax(1) for some in tiles.split(TILES_AT_ONCE)])
    return patterns[best].view(rows, columns, m, m).transpose(1, 2).reshape(weight.shape)
