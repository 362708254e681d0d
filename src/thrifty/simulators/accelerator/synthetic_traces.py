"""Synthetic traces: random masks of a given density and structure, from a seed."""

from collections.abc import Callable

import numpy as np

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of

MOST = 4 * 10**9
"""Maximum number of pairs per layer. Sampling takes one byte per pair."""
Drawing = Callable[[np.random.Generator, int, int, float], np.ndarray]


def uniform(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """Keep each pair with probability `density`: the worst case for designs that require balanced rows."""
    return random.random((heads, tokens, tokens)) < density


def balanced(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """Keep the same number of keys for each query, equally spaced from a random first key: the best case for designs
    that require balanced rows."""
    count = max(1, round(density * tokens))
    places = (np.arange(count) * tokens) // count
    first = random.integers(tokens, size=(heads, tokens, 1))
    mask = np.zeros((heads, tokens, tokens), dtype=bool)
    np.put_along_axis(mask, (first + places) % tokens, True, axis=-1)
    return mask


def runs(random: np.random.Generator, heads: int, tokens: int, density: float, run: int = 8) -> np.ndarray:
    """Keep neighboring keys together, in runs of `run` keys with random offset."""
    blocks = -(-tokens // run) + 1
    chosen = np.repeat(random.random((heads, tokens, blocks)) < density, run, axis=-1)
    shift = random.integers(run, size=(heads, tokens, 1))
    return np.take_along_axis(chosen, shift + np.arange(tokens), axis=-1)


def diagonal(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """Keep a window around the diagonal (half of the pairs) and global tokens (other half), as in vision models."""
    offset = np.abs(np.arange(tokens)[:, None] - np.arange(tokens))
    window = offset <= max(0, round((density * tokens / 2 - 1) / 2))
    in_window = window.mean()
    global_tokens = round(max(0.0, density - in_window) / max(1 - in_window, 1 / tokens) * tokens)
    mask = np.broadcast_to(window, (heads, tokens, tokens)).copy()
    for head in mask:
        head[:, random.choice(tokens, min(global_tokens, tokens), replace=False)] = True
    return mask


def power_law(
    random: np.random.Generator, heads: int, tokens: int, density: float, exponent: float = 1.0
) -> np.ndarray:
    """Keep keys with probability ∝ rank^-exponent (random ranks per head). Most queries keep the few top keys."""
    weight = np.arange(1, tokens + 1.0) ** -exponent
    popularity = np.stack([random.permutation(weight) for _ in range(heads)])
    factor = _scale_to(popularity, density)
    return random.random((heads, tokens, tokens)) < np.minimum(1, factor * popularity)[:, None, :]


def _scale_to(popularity: np.ndarray, density: float) -> float:
    """Return the factor by which `popularity` must be scaled so that its mean, clipped at 1, is `density`."""
    low, high = 0.0, 1.0 / popularity.min()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(1, middle * popularity).mean() < density else (low, middle)
    return high


PATTERNS: dict[str, Drawing] = {
    "uniform": uniform,
    "balanced": balanced,
    "runs": runs,
    "diagonal": diagonal,
    "power-law": power_law,
}


def synthetic_trace(
    pattern: str,
    density: float,
    layers: int = 1,
    heads: int = 12,
    tokens: int = 384,
    width: int = 64,
    lengths: list[int] | None = None,
    seed: int = 0,
) -> AttentionTrace:
    """Return a trace with random masks of a pattern of `PATTERNS`. `lengths` adds one example per length, padded.

    A query without sampled keys keeps one random key. Raises UsageError for an unknown pattern, a density outside
    (0, 1], or too many pairs.
    """
    refuse_unknown("there is no pattern", pattern, PATTERNS)
    if not 0 < density <= 1:
        raise UsageError(f"a density of {density:g} is not in (0, 1]", fix="pass a fraction of pairs, such as 0.2")
    sizes = lengths or [tokens]
    longest = max(sizes)
    if (pairs := len(sizes) * heads * longest**2) > MOST:
        raise UsageError(
            f"a layer of {pairs:.1e} pairs exceeds the limit of {MOST:.0e}", fix="use fewer examples, heads or tokens"
        )
    random = np.random.default_rng(seed)
    trace_layers = []
    for number in range(layers):
        mask = np.zeros((len(sizes), heads, longest, longest), dtype=bool)
        for example, size in enumerate(sizes):
            sampled = PATTERNS[pattern](random, heads, size, density)
            empty = ~sampled.any(-1)
            sampled[(*np.nonzero(empty), random.integers(size, size=int(empty.sum())))] = True
            mask[example, :, :size, :size] = sampled
        trace_layers.append(layer_of(f"layer {number}", mask=mask, lengths=sizes, width=width))
    about = {"pattern": pattern, "density": f"{density:g}", "seed": str(seed)}
    return AttentionTrace(f"{pattern} at density {density:g}", tuple(trace_layers), about)
