"""Memory layout of queries and keys in blocks, and scores of kept blocks for a chunk of rows at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.kernels.attention_dropout import dropout_factors
from thrifty.kernels.sparse_attention.block_grid import NONE, WHOLE
from thrifty.kernels.sparse_attention.visibility import VisibilityRule, same_text

SCORES = {"cpu": 2**16}
"""Maximum number of scores that are processed at once. At least one row of blocks is processed.

In float32 they fit a core's cache. At 2,048 tokens, twice as many scores took 6 % less time, but required more peak
memory than torch's own attention.
"""
GPU_SCORES = 2**24


@dataclass(frozen=True)
class BlockedInputs:
    """Inputs in blocks of B tokens: N = b · G sequences with T blocks of queries each. G is the number of heads with a
    grid of their own.
    """

    q: Tensor
    """Queries (N · T, r · B, k). The r query heads that share a grid are stacked."""
    k: Tensor
    v: Tensor
    """Values (b · g · S, B, k)."""
    columns: Tensor
    """Block columns of each row, (N · T, most) int64, kept blocks first."""
    counts: Tensor
    """Number of kept blocks per row, (N · T,)."""
    grid: Tensor
    """Codes of the grid, (N · T, S)."""
    mask: Tensor | None
    segments: Tensor | None
    sight: VisibilityRule
    block: int
    shape: tuple[int, int, int, int, int]
    """Sizes b, G, r, t and s."""
    scale: float

    @property
    def sides(self) -> tuple[int, int]:
        t, s = self.shape[3:]
        return -(-t // self.block), -(-s // self.block)


@dataclass(frozen=True)
class RowChunk:
    rows: Tensor
    """Indices of the chunk's rows of blocks, (c,)."""
    columns: Tensor
    """Block columns of these rows, as indices in a sequence, (c, n)."""
    keys: Tensor
    """Block columns as indices in `BlockedInputs.k`, (c · n,)."""
    scores: Tensor
    """Scores (c, r · B, n · B), -inf for invisible pairs."""


def lay_out_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    block: int,
    sight: VisibilityRule,
    scale: float,
) -> BlockedInputs:
    """Return q (b, h, t, k), k and v (b, g, s, k) in blocks. Without padding and shared heads, no tensor is copied."""
    (b, h, t, width), (g, s) = q.shape, k.shape[1:3]
    per_head = codes.shape[1] == h or (mask is not None and mask.shape[1] > 1)
    heads = h if per_head else g
    rows, columns = codes.shape[2:]
    queries = in_blocks(q, rows, block).unflatten(1, (heads, h // heads)).transpose(2, 3)  # (b, G, T, r, B, k)
    keys, values = (in_blocks(x, columns, block).reshape(b * g * columns, block, -1) for x in (k, v))
    if codes.shape[1] == g and heads == h:
        codes = codes.repeat_interleave(h // g, 1)
    kept, order = (codes != NONE).sort(dim=-1, descending=True, stable=True)
    counts = kept.sum(-1).expand(b, heads, rows).flatten()
    most = int(counts.max()) if counts.numel() else 0
    order = order[..., :most].expand(b, heads, rows, most).reshape(b * heads * rows, most)
    return BlockedInputs(
        queries.reshape(b * heads * rows, -1, width), keys, values, order, counts,
        codes.expand(b, heads, rows, columns).reshape(b * heads * rows, columns), mask, segments, sight, block,
        (b, heads, h // heads, t, s), scale,
    )  # fmt: skip


def in_blocks(x: Tensor, blocks: int, block: int) -> Tensor:
    """Return x (b, n, t, k) in blocks as (b, n, blocks, B, k), with zeros after the last token."""
    missing = blocks * block - x.shape[2]
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (blocks, block))


def chunks(work: BlockedInputs) -> Iterator[RowChunk]:
    """Yield the scores of all rows in chunks that fit the cache. Rows with the most kept blocks come first."""
    b, heads, r, _, _ = work.shape
    rows, columns = work.sides
    shared = work.k.shape[0] // (b * columns)  # key-value heads
    order = work.counts.argsort(descending=True, stable=True)
    counts = work.counts[order].tolist()
    device = work.q.device.type
    room = SCORES.get(device, GPU_SCORES) // (r * work.block**2)
    at = 0
    while at < len(counts) and counts[at]:
        n = counts[at]
        chosen = order[at : at + max(room // n, 1)]
        at += len(chosen)
        own = work.columns[chosen, :n]
        sequence = chosen // rows  # index among b · G sequences
        key_head = (sequence // heads) * shared + (sequence % heads) * shared // heads
        keys = (key_head[:, None] * columns + own).flatten()
        key_blocks = work.k.index_select(0, keys).view(len(chosen), -1, work.k.shape[-1])
        queries, scale = work.q.index_select(0, chosen), work.scale
        if queries.dtype == torch.float16:  # products without the scale may exceed the range of float16
            queries, scale = queries * scale, 1.0
        scores = torch.bmm(queries, key_blocks.transpose(1, 2))
        del queries, key_blocks
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scale)
        _hide(work, scores, chosen, own)
        yield RowChunk(chosen, own, keys, scores)


def dropout_of(work: BlockedInputs, chunk: RowChunk, rate: float, seed: Tensor) -> Tensor:
    """Return the factors of the weights of a chunk, in the shape of its scores."""
    _, _, r, _, _ = work.shape
    lane = torch.arange(work.block, device=chunk.rows.device)
    heads = (chunk.rows // work.sides[0])[:, None] * r + torch.arange(r, device=lane.device)
    queries = (chunk.rows % work.sides[0] * work.block)[:, None] + lane
    keys = (chunk.columns * work.block)[..., None] + lane
    factors = dropout_factors(
        seed, rate, heads[:, :, None, None, None], queries[:, None, :, None, None], keys[:, None, None]
    )
    return factors.view_as(chunk.scores)


def _hide(work: BlockedInputs, scores: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Set the scores of invisible pairs to -inf in place."""
    _, _, r, t, s = work.shape
    block = work.block
    (c, n), parts = columns.shape, scores.view(scores.shape[0], r, block, columns.shape[1], block)
    lane = torch.arange(block, device=scores.device)
    codes = work.grid[rows].gather(1, columns)
    unsure = codes != WHOLE
    if s % block:
        unsure |= columns == work.sides[1] - 1
    place, number = unsure.nonzero(as_tuple=True)
    if len(place):
        query = (rows[place] % work.sides[0] * block)[:, None] + lane
        key = (columns[place, number] * block)[:, None] + lane
        seen = work.sight.visible(query[:, :, None], key[:, None, :]) & (key < s)[:, None, :]
        seen &= (codes[place, number] != NONE)[:, None, None]
        hidden = parts[place, :, :, number].masked_fill_(~seen[:, None], float("-inf"))
        parts[place, :, :, number] = hidden
    if work.mask is None and work.segments is None:
        return
    query = ((rows % work.sides[0] * block)[:, None] + lane).clamp(max=t - 1)
    key = ((columns * block)[:, :, None] + lane).flatten(1).clamp(max=s - 1)
    sequence = rows // work.sides[0]
    example = sequence // work.shape[1]
    if work.mask is not None:
        b, heads = work.shape[:2]
        whole = work.mask.expand(b, work.mask.shape[1], t, s)
        head = sequence % heads if whole.shape[1] > 1 else torch.zeros_like(sequence)
        seen = whole[example[:, None, None], head[:, None, None], query[:, :, None], key[:, None, :]]
        scores.view(c, r, block, n * block).masked_fill_(~seen[:, None], float("-inf"))
    if work.segments is not None:
        seen = same_text(work.segments[example], query, key)
        scores.view(c, r, block, n * block).masked_fill_(~seen[:, None], float("-inf"))


def from_blocks(x: Tensor, work: BlockedInputs) -> Tensor:
    """Return block rows (N · T, r · B, k) as heads (b, h, t, k), contiguous. Reverses `to_blocks`."""
    b, heads, r, t, _ = work.shape
    x = x.view(b, heads, work.sides[0], r, work.block, x.shape[-1]).transpose(2, 3)
    return x.reshape(b, heads * r, -1, x.shape[-1])[:, :, :t].contiguous()


def to_blocks(x: Tensor, work: BlockedInputs) -> Tensor:
    """Return heads (b, h, t, k) as block rows (N · T, r · B, k)."""
    _, heads, r, _, _ = work.shape
    blocks = in_blocks(x, work.sides[0], work.block).unflatten(1, (heads, r)).transpose(2, 3)
    return blocks.reshape(work.q.shape[0], work.q.shape[1], x.shape[-1])
