"""Traces that nobody recorded: masks of a known density and structure, from a seed."""

from collections.abc import Callable

import numpy as np

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of

MOST = 4 * 10**9
"""Pairs of a layer, a byte each while they are drawn."""
Drawing = Callable[[np.random.Generator, int, int, float], np.ndarray]


def uniform(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """Every pair is kept with the same probability, each for itself: the worst case for anything that needs balance."""
    return random.random((heads, tokens, tokens)) < density


def balanced(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """Every query keeps as many keys as any other, at equal distances from a random first: the best case."""
    count = max(1, round(density * tokens))
    places = (np.arange(count) * tokens) // count
    first = random.integers(tokens, size=(heads, tokens, 1))
    mask = np.zeros((heads, tokens, tokens), dtype=bool)
    np.put_along_axis(mask, (first + places) % tokens, True, axis=-1)
    return mask


def runs(random: np.random.Generator, heads: int, tokens: int, density: float, run: int = 8) -> np.ndarray:
    """Neighbouring keys are kept together, in runs of `run` that begin anywhere."""
    blocks = -(-tokens // run) + 1
    chosen = np.repeat(random.random((heads, tokens, blocks)) < density, run, axis=-1)
    shift = random.integers(run, size=(heads, tokens, 1))
    return np.take_along_axis(chosen, shift + np.arange(tokens), axis=-1)


def diagonal(random: np.random.Generator, heads: int, tokens: int, density: float) -> np.ndarray:
    """A window around the diagonal for half of the kept pairs, and as many global tokens as make up the rest, as vision
    models show."""
    offset = np.abs(np.arange(tokens)[:, None] - np.arange(tokens))
    window = offset <= max(0, round((density * tokens / 2 - 1) / 2))
    alone = window.mean()
    kept_globally = round(max(0.0, density - alone) / max(1 - alone, 1 / tokens) * tokens)
    mask = np.broadcast_to(window, (heads, tokens, tokens)).copy()
    for head in mask:
        head[:, random.choice(tokens, min(kept_globally, tokens), replace=False)] = True
    return mask


def power_law(
    random: np.random.Generator, heads: int, tokens: int, density: float, exponent: float = 1.0
) -> np.ndarray:
    """Keys are kept by popularity, rank^-exponent in a random order of a head's own: a few by almost every query."""
    weight = np.arange(1, tokens + 1.0) ** -exponent
    popularity = np.stack([random.permutation(weight) for _ in range(heads)])
    factor = _scale_to(popularity, density)
    return random.random((heads, tokens, tokens)) < np.minimum(1, factor * popularity)[:, None, :]


def _scale_to(popularity: np.ndarray, density: float) -> float:
    """The factor by which probabilities, cut at 1, have this mean."""
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
    """A trace of one of the PATTERNS; with `lengths` an example for each, padded to the longest.

    No row is left empty: a query that nothing was drawn for keeps one key drawn at random. Raises UsageError for an
    unknown pattern or a density outside (0, 1].
    """
    refuse_unknown("there is no pattern", pattern, PATTERNS)
    if not 0 < density <= 1:
        raise UsageError(f"a density of {density:g} is not in (0, 1]", fix="it is the share that is kept")
    sizes = lengths or [tokens]
    longest = max(sizes)
    if (pairs := len(sizes) * heads * longest**2) > MOST:
        raise UsageError(f"{pairs:.1e} pairs of a layer are more than can be drawn here", fix=f"up to {MOST:.0e}")
    random = np.random.default_rng(seed)
    made = []
    for number in range(layers):
        mask = np.zeros((len(sizes), heads, longest, longest), dtype=bool)
        for example, size in enumerate(sizes):
            drawn = PATTERNS[pattern](random, heads, size, density)
            empty = ~drawn.any(-1)
            drawn[(*np.nonzero(empty), random.integers(size, size=int(empty.sum())))] = True
            mask[example, :, :size, :size] = drawn
        made.append(layer_of(f"layer {number}", mask=mask, lengths=sizes, width=width))
    about = {"pattern": pattern, "density": f"{density:g}", "seed": str(seed)}
    return AttentionTrace(f"{pattern} at density {density:g}", tuple(made), about)
