"""Measured time of attention on this machine, reported separately from simulated times.

Attention over all pairs runs in torch, in float32 on a CPU and float16 on a GPU. Attention over kept pairs runs in
scipy, on one CPU thread. (`kernels/sparse_attention` is faster, but its compilation takes a second.) If a trace has no
queries, keys or values, random arrays replace them; the time is the same.
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
"""Maximum number of timed operations, for all pairs and for kept pairs. Both take a few seconds on a small CPU."""
AT_A_TIME = 2**13
"""Number of pairs whose queries and keys are gathered at once, so that the gathered values fit the cache."""
Operands = tuple[Tensor, Tensor, Tensor]


def fastest_seconds(work: Callable[[], object], times: int) -> float:
    """Return the seconds of the fastest of `times` runs."""
    return min(timeit.repeat(work, number=1, repeat=times))


def all_pairs_seconds(trace: AttentionTrace, device: str = "cpu", times: int = 3) -> float | None:
    """Return the seconds of torch's attention over all layers including padding, or None above `LIMIT` operations.

    A layer with an exactly causal mask runs with `is_causal`.
    """
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
    """Return the seconds of scores, softmax and values at kept pairs, or None above `SPARSE_LIMIT` operations.

    scipy computes each head separately; the faster of two runs counts. Building the sparse patterns is not timed.
    """
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
    """Return the attention output (queries, width) of q (queries, width) over k and v (keys, width), at the pairs of
    the pattern (queries, keys).

    The output of a query without kept keys is zero.
    """
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
    """Return q (examples, heads, queries, width), k and v (examples, heads, keys, width) in float32, recorded or
    random.
    """
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
