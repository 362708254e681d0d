"""What attention takes on this machine now, to stand beside what is simulated and apart from it.

All pairs by torch's own attention, in float32 on a processor and float16 on a GPU; kept pairs alone by scipy on one
thread of a processor. (`kernels/sparse_attention` is faster, and compiles for a second first.) Where a trace has no
operands random ones stand in, which take as long.
"""

import timeit
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace

LIMIT, SPARSE_LIMIT = 1e11, 1e10
"""Operations of all pairs, and of kept ones, beyond which nothing is timed: some seconds of a small processor."""
AT_A_TIME = 2**13
"""Pairs whose queries and keys are brought together at once: as many as a cache holds."""
Operands = tuple[Tensor, Tensor, Tensor]


def fastest_seconds(work: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of so many."""
    return min(timeit.repeat(work, number=1, repeat=times))


def all_pairs_seconds(trace: AttentionTrace, device: str = "cpu", times: int = 3) -> float | None:
    """Of torch's attention of all layers, one after the other, padding and all; causal where the masks are just that.
    None for more than LIMIT operations."""
    if sum(4.0 * layer.units * layer.queries * layer.keys * layer.width for layer in trace.layers) > LIMIT:
        return None
    dtype = torch.float32 if device == "cpu" else torch.float16
    calls = [(tuple(x.to(device, dtype) for x in _operands(layer)), _is_causal(layer)) for layer in trace.layers]

    def attend() -> None:
        for operands, causal in calls:
            F.scaled_dot_product_attention(*operands, is_causal=causal)
        if device != "cpu":
            torch.cuda.synchronize()

    attend()
    return fastest_seconds(attend, times)


def kept_pairs_seconds(trace: AttentionTrace) -> float | None:
    """Of scores, softmax and values at kept pairs alone, by scipy's sparse matrices, head by head, the faster of two
    times each, patterns being known beforehand. None for more than SPARSE_LIMIT operations."""
    if sum(4.0 * layer.kept_counts.sum() * layer.width for layer in trace.layers) > SPARSE_LIMIT:
        return None
    total = 0.0
    for layer in trace.layers:
        q, k, v = (x.flatten(0, 1).numpy() for x in _operands(layer))
        for unit, kept in enumerate(layer.kept()):
            work = partial(sparse_attention, q[unit], k[unit], v[unit], sparse.csr_array(kept))
            total += fastest_seconds(work, 2)
    return total


def sparse_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, pattern: sparse.csr_array) -> np.ndarray:
    """Attention of q (t, k) over those of k and v (s, k) that the pattern (t, s) keeps; zeros where it keeps none."""
    counts = np.diff(pattern.indptr)
    row = np.repeat(np.arange(len(q)), counts)
    scores = np.empty(len(row), q.dtype)
    for first in range(0, len(row), AT_A_TIME):
        part = slice(first, first + AT_A_TIME)
        np.einsum("ij,ij->i", q[row[part]], k[pattern.indices[part]], out=scores[part])
    scores *= q.shape[1] ** -0.5
    kept = counts > 0
    starts, largest = pattern.indptr[:-1][kept], np.zeros(len(q), scores.dtype)
    largest[kept] = np.maximum.reduceat(scores, starts)
    weights = np.exp(scores - largest[row])
    total = np.ones(len(q), scores.dtype)
    total[kept] = np.add.reduceat(weights, starts)
    return sparse.csr_array((weights / total[row], pattern.indices, pattern.indptr), pattern.shape) @ v


def _operands(layer: AttentionLayer) -> Operands:
    """q, k and v (e, h, ·, k) in float32."""
    random = np.random.default_rng(0)
    e, h, t, s, d = layer.examples, layer.heads, layer.queries, layer.keys, layer.width
    shapes = {"q": (e, h, t, d), "k": (e, h, s, d), "v": (e, h, s, d)}
    arrays = [
        random.standard_normal(shape, np.float32) if (known := getattr(layer, name)) is None else known
        for name, shape in shapes.items()
    ]
    q, k, v = (torch.from_numpy(array.astype(np.float32)) for array in arrays)
    return q, k, v


def _is_causal(layer: AttentionLayer) -> bool:
    if layer.packed is None or layer.queries != layer.keys:
        return False
    real = np.arange(layer.keys) < layer.unit_keys[:, None]
    seen = np.tri(layer.queries, dtype=bool) & real[:, None, :] & real[:, :, None]
    return bool((layer.kept() == seen).all())
