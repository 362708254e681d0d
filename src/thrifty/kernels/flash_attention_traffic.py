"""FlashAttention as it is written down, with every word counted that goes between a large memory and a small one.

Paper: Dao et al. 2022, FlashAttention (arXiv 2205.14135), algorithm 1 and theorem 2; the other order of loops is Dao
2023 (arXiv 2307.08691), algorithm 1. A word is one number. N tokens, d head width, M words of the small memory; one
head.

For reading and counting, not for speed: `kernels/tiled_attention.py` and `kernels/sparse_attention` are for that.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Outer = Literal["keys", "queries"]
"""Which loop is outside: over tiles of keys, as in the first paper, or of queries, as in the second."""


@dataclass
class MemoryTraffic:
    """Words that were read from the large memory and written to it."""

    read: int = 0
    written: int = 0

    @property
    def words(self) -> int:
        return self.read + self.written

    def load(self, *tensors: Tensor) -> None:
        self.read += sum(tensor.numel() for tensor in tensors)

    def store(self, *tensors: Tensor) -> None:
        self.written += sum(tensor.numel() for tensor in tensors)


def tile_sizes(width: int, memory: int) -> tuple[int, int]:
    """Queries and keys of a tile: min(⌈M / 4d⌉, d) and ⌈M / 4d⌉."""
    keys = -(-memory // (4 * width))
    return min(keys, width), keys


def standard_words(tokens: int, width: int) -> int:
    """Of attention that writes scores and probabilities out: 4 N d for what it is given and gives, 4 N² for those."""
    return 4 * tokens * width + 4 * tokens**2


def flash_words(tokens: int, width: int, memory: int, outer: Outer = "keys", density: float = 1.0) -> float:
    """Of tiled attention, Θ(N² d² / M); of all tiles the share `density` is visited.

    With keys outside, keys and values are read once, and each of the ⌈N / Bc⌉ passes over queries reads q, the output,
    its sum and its maximum, and writes the last three. With queries outside, keys and values are read once for each of
    the ⌈N / Br⌉ tiles of queries, and the output and its log-sum-exp are written once.
    """
    of_queries, of_keys = tile_sizes(width, memory)
    if outer == "keys":
        passes = -(-tokens // of_keys)
        return 2 * tokens * width + passes * (3 * tokens * width + 4 * tokens) * density
    passes = -(-tokens // of_queries)
    return 2 * tokens * width + tokens + passes * 2 * tokens * width * density


@dataclass
class _RunningSoftmax:
    """The output so far of a tile of queries, with the maximum and the sum of its softmax."""

    output: Tensor
    largest: Tensor
    total: Tensor

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> "_RunningSoftmax":
        """With one more tile of keys and values: online softmax, the output kept divided by its sum."""
        scores = q @ k.mT * q.shape[-1] ** -0.5
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        probability, before = (scores - largest).exp(), self.total * (self.largest - largest).exp()
        total = before + probability.sum(-1, keepdim=True)
        return _RunningSoftmax((self.output * before + probability @ v) / total, largest, total)


def counted_attention(
    q: Tensor, k: Tensor, v: Tensor, memory: int, outer: Outer = "keys"
) -> tuple[Tensor, Tensor, MemoryTraffic]:
    """Softmax attention of one head, q, k and v (N, d), tile by tile: output (N, d), log-sum-exp (N, 1), and the words
    that went back and forth."""
    of_queries, of_keys = tile_sizes(q.shape[1], memory)
    traffic, output = MemoryTraffic(), torch.zeros_like(q)
    largest, total = q.new_full((len(q), 1), float("-inf")), q.new_zeros(len(q), 1)
    key_tiles = list(zip(k.split(of_keys), v.split(of_keys), strict=True))
    query_tiles = [slice(at, at + of_queries) for at in range(0, len(q), of_queries)]
    if outer == "keys":
        for keys, values in key_tiles:
            traffic.load(keys, values)
            for at in query_tiles:
                traffic.load(q[at], output[at], largest[at], total[at])
                now = _RunningSoftmax(output[at], largest[at], total[at]).add(q[at], keys, values)
                output[at], largest[at], total[at] = now.output, now.largest, now.total
                traffic.store(now.output, now.largest, now.total)
        return output, largest + total.log(), traffic
    for at in query_tiles:
        traffic.load(q[at])
        now = _RunningSoftmax(output[at], largest[at], total[at])
        for keys, values in key_tiles:
            traffic.load(keys, values)
            now = now.add(q[at], keys, values)
        output[at], largest[at], total[at] = now.output, now.largest, now.total
        traffic.store(now.output, now.total)  # the log-sum-exp alone
    return output, largest + total.log(), traffic
