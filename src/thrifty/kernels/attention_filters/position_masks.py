"""Patterns that depend on places alone, as masks (t, t): what hardware and tests take in place of grids of blocks."""

import torch
from torch import Tensor

from thrifty.kernels.sparse_attention.block_grid import NONE, BlockGrid
from thrifty.kernels.sparse_attention.visibility import VisibilityRule


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
