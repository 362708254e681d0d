"""Grids of kept blocks of query-key pairs: int8 codes (b or 1, h, g or 1, T, S), one code per block.

A grid is computed by arithmetic alone, without a random generator and without reading values. A grid can therefore be
traced and compiled. Its number of kept blocks depends only on sizes, so the FLOPs are known without values.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.sparse_attention.visibility import VisibilityRule

NONE, WHOLE, PART = 0, 1, 2
"""Codes of a block: not kept, kept with all pairs, or kept with the pairs that the visibility rule `sight` allows."""


@dataclass(frozen=True)
class BlockGrid:
    codes: Tensor
    block: int
    """Number of tokens per side of a block."""
    count: int
    """Maximum number of kept blocks per head and example. Only the FLOP count depends on `count`."""
    sight: VisibilityRule = field(default_factory=VisibilityRule)  # torch 2.11 cannot compile an object as default


def blocks_of(tokens: int, block: int) -> int:
    return -(-tokens // block)


def encode_blocks(kept: Tensor, sight: VisibilityRule, block: int) -> Tensor:
    """Return codes of blocks (…, T, S). A kept block without visible pairs counts as not kept."""
    rows = torch.arange(kept.shape[-2], device=kept.device)[:, None]
    columns = torch.arange(kept.shape[-1], device=kept.device)[None, :]
    some, wholly = sight.visible_blocks(rows, columns, block)
    return torch.where(kept & some, torch.where(wholly, WHOLE, PART), NONE).to(torch.int8)


def window_grid(tokens: int, sight: VisibilityRule, block: int, device: torch.device | None = None) -> BlockGrid:
    """Return a grid of all blocks with a visible pair. Attention then covers exactly the pairs that `sight` allows."""
    side = blocks_of(tokens, block)
    codes = encode_blocks(torch.ones(1, 1, side, side, dtype=torch.bool, device=device), sight, block)
    return BlockGrid(codes, block, _window_count(side, sight, block), sight)


def scattered_grid(
    tokens: int,
    block: int,
    near: int,
    first: int,
    drawn: int,
    causal: bool,
    seed: int = 0,
    device: torch.device | None = None,
) -> BlockGrid:
    """Return a grid as in BigBird (Zaheer et al. 2020, arXiv 2007.14062, section 2).

    For each block of queries, the grid keeps the block itself, `near` blocks on each side, and `drawn` random blocks
    chosen by `seed`. All blocks see the `first` blocks, and the `first` blocks see all blocks.
    """
    side = blocks_of(tokens, block)
    row = torch.arange(side, device=device)[:, None]
    column = torch.arange(side, device=device)[None, :]
    kept = ((row - column).abs() <= near) | (column < first) | (row < first)
    seen = column <= row if causal else column >= 0
    others = seen & ~kept
    if drawn and side:
        # depends only on positions, so that a row samples the same earlier blocks in a shorter text
        priority = torch.where(others, _mixed(row * 2**16 + column, seed), -1)
        best = priority.topk(min(drawn, side), dim=-1)
        chosen = torch.zeros_like(kept).scatter(-1, best.indices, best.values >= 0)
        kept = kept | chosen
    sight = VisibilityRule(causal)
    return BlockGrid(
        encode_blocks(kept[None, None], sight, block), block, _scattered_count(side, near, first, drawn, causal), sight
    )


def visible_in_grid(grid: BlockGrid, queries: int, keys: int) -> Tensor:
    """Return the visible pairs in kept blocks, boolean (b or 1, h or 1, t, s)."""
    kept = (grid.codes != NONE).repeat_interleave(grid.block, -2).repeat_interleave(grid.block, -1)
    device = grid.codes.device
    at = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    return kept[..., :queries, :keys] & grid.sight.visible(*at)


def check_grid(grid: BlockGrid, q: Tensor, k: Tensor) -> None:
    """Raise UsageError if a grid does not fit queries (b, h, t, k) and keys (b, g, s, k)."""
    heads = {1, k.shape[1], q.shape[1]}
    b, h, rows, columns = grid.codes.shape
    wanted = blocks_of(q.shape[2], grid.block), blocks_of(k.shape[2], grid.block)
    if b not in (1, q.shape[0]) or h not in heads or (rows, columns) != wanted:
        raise UsageError(
            f"a grid of {tuple(grid.codes.shape)} blocks of {grid.block} does not fit queries {tuple(q.shape)} and "
            f"keys {tuple(k.shape)}",
            fix=f"use a grid of shape (1 or {q.shape[0]}, one of {sorted(heads)}, {wanted[0]}, {wanted[1]})",
        )


def _mixed(numbers: Tensor, seed: int) -> Tensor:
    """Return pseudo-random integers below 2^31 that depend only on `numbers` and the seed."""
    mixed = (numbers + 0x9E3779B1 * (seed + 1)) & 0x7FFFFFFF
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 0x1B56C4E9)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return mixed ^ (mixed >> 15)


def _window_count(side: int, sight: VisibilityRule, block: int) -> int:
    """Return the number of blocks with a visible pair in a window, without reading values."""
    if not sight.window:
        return side * (side + 1) // 2 if sight.causal else side * side
    reach = (sight.window - 1 + block - 1) // block
    return _scattered_count(side, reach, blocks_of(sight.first, block), 0, sight.causal)


def _scattered_count(side: int, near: int, first: int, drawn: int, causal: bool) -> int:
    count = 0
    for row in range(side):
        last = row if causal else side - 1
        if row < first:
            count += last + 1
            continue
        begin, end = max(row - near, 0), min(row + near, last)
        fixed = end - begin + 1 + min(begin, first)
        count += min(fixed + drawn, last + 1)
    return count
