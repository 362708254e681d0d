"""Each design's own filter on a recorded trace, at the same density for all designs.

`kernels/attention_filters` implements the filters. This module searches the threshold that reaches a density, or the
density that reaches an output error. `attention_error.py` measures the error. DOTA trains its detector with the model;
here a random projection replaces the detector. ViTCoD averages maps over a training set; here the average is over the
trace.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_filters import (
    a3_filter,
    dota_filter,
    elsa_filter,
    sanger_filter,
    spatten_filter,
    vitcod_filter,
)
from thrifty.kernels.attention_filters.keep_masks import exact_scores, seen_softmax, with_one
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_error import attention_cost
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace

LONGEST = 4.0
"""Maximum number of iterations of A3's search per key. A key has one product per dim of the head."""
REDUCTION = 0.2
"""Width of DOTA's detector as a fraction of the head width (unverified)."""


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """A layer's q (e, h, t, k), k (e, h, s, k) and visible pairs (e, h, t, s). A filter must reach `density`. `number`
    is the layer's index among `layers` layers. Shapes: e examples, h heads, t queries, s keys, k head width.
    """

    q: Tensor
    k: Tensor
    visible: Tensor
    density: float
    number: int
    layers: int

    @property
    def probabilities(self) -> Tensor:
        """Exact softmax (examples, heads, queries, keys), with zeros for queries without visible keys."""
        return seen_softmax(exact_scores(self.q, self.k), self.visible)


FilterResult = tuple[Tensor, dict[str, np.ndarray]]
"""Mask (examples, heads, queries, keys), and counts (examples, heads, queries) by name."""


def highest(scores: Tensor, visible: Tensor, density: float) -> Tensor:
    """Return the mask (examples, heads, queries, keys) of the highest scores: the fraction `density` of visible pairs,
    and at least one pair per query.
    """
    seen = scores[visible]
    if not len(seen):
        return torch.zeros_like(visible)
    count = max(1, round(density * len(seen)))
    threshold = seen.kthvalue(len(seen) - count + 1).values
    return with_one(scores >= threshold, scores, visible)


def _elsa(heads: LayerHeads) -> FilterResult:
    sizes = elsa_filter.factor_sizes(heads.q.shape[-1])
    factors = [torch.tensor(factor) for factor in elsa_filter.seeded_factors(sizes, 0)]
    similarity = elsa_filter.elsa_similarity(heads.q, heads.k, factors, elsa_filter.angle_bias(sizes))
    largest = elsa_filter.largest_norm(heads.k, heads.q.shape[1], heads.visible).clamp(min=1e-20)
    return highest(similarity / largest, heads.visible, heads.density), {}


def _a3(heads: LayerHeads, searched: float = 0.5) -> FilterResult:
    """Search candidate keys conservatively, and keep the candidates with the highest scores until the density is
    reached.

    If the search finds too few candidates, it is repeated with twice the iterations, up to `LONGEST` per key.
    """
    candidates = a3_filter.a3_candidates(heads.q, heads.k, searched, heads.visible)
    if candidates.sum() < heads.density * heads.visible.sum() and searched < LONGEST:
        return _a3(heads, 2 * searched)
    scores = exact_scores(heads.q, heads.k)
    below = scores - scores.masked_fill(~candidates, float("-inf")).amax(-1, keepdim=True)
    fraction = min(1.0, heads.density * float(heads.visible.sum()) / max(float(candidates.sum()), 1.0))
    keep = with_one(highest(below, candidates, fraction) & candidates, scores, heads.visible)
    rounds = (heads.visible.sum(-1) * searched).ceil()
    return keep, {"candidates": _whole(candidates.sum(-1)), "iterations": _whole(rounds)}


def _sanger(heads: LayerHeads) -> FilterResult:
    largest = tuple(float(sanger_filter.unit_rows(x)[0].abs().amax()) for x in (heads.q, heads.k))
    scores = sanger_filter.predicted_scores(heads.q, heads.k, 4, (largest[0], largest[1]))
    predicted = scores.masked_fill(~heads.visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    return highest(predicted, heads.visible, heads.density), {}


def _dota(heads: LayerHeads) -> FilterResult:
    """Keep the same number of keys for each query, by scores of randomly projected queries and keys.

    A query with fewer visible keys keeps all of them. The random projection replaces DOTA's trained detector.
    """
    width, count = heads.q.shape[-1], heads.visible.shape[-1]
    generator = torch.Generator().manual_seed(0)
    projection = dota_filter.sparse_projection(width, max(1, round(REDUCTION * width)), generator)
    scores = exact_scores(heads.q.float() @ projection, heads.k.float() @ projection)
    seen = heads.visible.sum(-1).flatten(1)
    reaching = (seen[..., None] > torch.arange(count)).sum(1)  # queries that see more than 0, 1, … keys
    counts = (reaching.cumsum(-1) - heads.density * seen.sum(-1, keepdim=True)).abs().argmin(-1) + 1
    return dota_filter.keep_of(dota_filter.balanced_keys(scores, int(counts.max()), heads.visible, counts), count), {}


def _vitcod(heads: LayerHeads) -> FilterResult:
    """Return the same mask for all examples, from their average attention map. The threshold is found by bisection."""
    average = heads.probabilities.mean(0)
    low, high = 0.0, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        kept = (vitcod_filter.informative_pairs(average, middle) & heads.visible).sum() / heads.visible.sum()
        low, high = (low, middle) if kept >= heads.density else (middle, high)
    keep = vitcod_filter.informative_pairs(average, high).expand_as(heads.visible)
    return with_one(keep, heads.probabilities, heads.visible), {}


FILTERS: dict[str, Callable[[LayerHeads], FilterResult]] = {
    "elsa": _elsa,
    "a3": _a3,
    "sanger": _sanger,
    "dota": _dota,
    "vitcod": _vitcod,
}
"""Filters of one layer, by design. SpAtten's filter `_cascaded` works across layers and is not listed."""
EXACT = "exact"
"""Name of the reference filter, which keeps the highest exact scores. An accelerator cannot know these scores before
attention.
"""
SELECTIVE = (*FILTERS, "spatten")
"""Designs that can omit pairs. All other designs compute all pairs."""


def uses_masks(machine: AcceleratorSpec) -> bool:
    """Return True if the design can omit pairs and the machine's `approximate` is on."""
    return machine.design in SELECTIVE and bool(machine.settings.get("approximate", True))


def apply_design_filter(trace: AttentionTrace, design: str, density: float) -> AttentionTrace:
    """Apply a design's own filter, or the `EXACT` filter, to a trace at about `density` of the visible pairs.

    If the design has no filter, the trace is unchanged. The provenance of the result records "filter", "softmax kept"
    and, if the trace has values, "output error". Raises UsageError for a trace without queries and keys.
    """
    return _with_errors(trace, _masked(trace, design, density))


def filter_within_error(trace: AttentionTrace, design: str, error: float) -> AttentionTrace:
    """Apply a filter at the lowest density with an output error of at most `error`; see `apply_design_filter`.

    Bisection finds the density, a multiple of 0.01. If the error is larger even at density 1, density 1 is used, and
    "within allowed" is "no" in the provenance. Raises UsageError for a trace without queries, keys and values.
    """
    if not 0 < error < 1:
        raise UsageError(
            f"an error of {error:g} is not in (0, 1)", fix="pass a fraction of the outputs' norm, such as 0.05"
        )
    if design not in (*SELECTIVE, EXACT):
        return trace
    best, low, high = None, 0, 101
    while high - low > 1:
        middle = (low + high) // 2
        masked = _masked(trace, design, middle / 100)
        output_error = attention_cost(trace, masked).output_error
        if output_error is None:
            raise UsageError("the trace has no values, which output errors require", fix="record a run or a preset")
        low, high, best = (low, middle, masked) if output_error <= error else (middle, high, best)
    result = _with_errors(trace, best or _masked(trace, design, 1.0))
    about = {"error allowed": f"{error:g}", "within allowed": "yes" if best else "no"}
    return replace(result, provenance={**result.provenance, **about})


def _masked(trace: AttentionTrace, design: str, density: float) -> AttentionTrace:
    if design not in (*SELECTIVE, EXACT):
        return trace
    if not 0 < density <= 1:
        raise UsageError(f"a density of {density:g} is not in (0, 1]", fix="pass a fraction of pairs, such as 0.2")
    for layer in trace.layers:
        if layer.q is None or layer.k is None:
            raise UsageError(
                f"layer {layer.name!r} has no queries and keys, which a filter requires",
                fix="record a run or a preset",
            )
    heads = [_heads(layer, density, number, len(trace.layers)) for number, layer in enumerate(trace.layers)]
    with torch.no_grad():
        if design == "spatten":
            results = _cascaded(heads)
        else:
            results = [FILTERS.get(design, _exact)(each) for each in heads]
    layers = tuple(
        layer.masked(mask.numpy(), counts) for layer, (mask, counts) in zip(trace.layers, results, strict=True)
    )
    return replace(trace, layers=layers, provenance={**trace.provenance, "filter": design})


def _with_errors(before: AttentionTrace, after: AttentionTrace) -> AttentionTrace:
    if after is before:
        return after
    cost = attention_cost(before, after)
    about = {**after.provenance, "softmax kept": f"{cost.softmax_kept:.4f}"}
    if cost.output_error is not None:
        about["output error"] = f"{cost.output_error:.4f}"
    return replace(after, provenance=about)


def _exact(heads: LayerHeads) -> FilterResult:
    return highest(heads.probabilities, heads.visible, heads.density), {}


def _heads(layer: AttentionLayer, density: float, number: int, layers: int) -> LayerHeads:
    assert layer.q is not None and layer.k is not None
    shape = (layer.examples, layer.heads, layer.queries, layer.keys)
    visible = torch.from_numpy(layer.kept().reshape(shape))
    return LayerHeads(
        *(torch.from_numpy(x.astype(np.float32)) for x in (layer.q, layer.k)), visible, density, number, layers
    )


def _cascaded(heads: list[LayerHeads]) -> list[FilterResult]:
    """Return SpAtten's masks. Bisection finds the average fraction of dropped tokens for the density.

    The first layers drop no tokens, so a trace of few layers cannot reach a low density.
    """
    pairs = sum(int(each.visible.sum()) for each in heads)
    low, high = 0.0, 0.9
    for _ in range(10):
        middle = (low + high) / 2
        left = sum(int(_computed(result).sum()) for result in _dropping(heads, middle))
        low, high = (middle, high) if left > heads[0].density * pairs else (low, middle)
    return _dropping(heads, high)


def _dropping(heads: list[LayerHeads], average: float) -> list[FilterResult]:
    """Return the masks after dropping the least important tokens. The first 15 % of the layers drop none; from layer to
    layer, more tokens are dropped.

    A trace requires at least one kept pair per query. A dropped query therefore keeps one pair in the mask, and its
    entry in the counts "alive" is 0: designs do not compute it. Unlike SpAtten, this filter does not skip small values
    per query.
    """
    results: list[FilterResult] = []
    alive = heads[0].visible.any(1).any(1)
    importance = torch.zeros(alive.shape)
    for each in heads:
        e, h, t, s = each.visible.shape
        if t != s:
            raise UsageError(
                f"SpAtten drops queries and keys together, but the trace has {t} queries and {s} keys",
                fix="trace self-attention",
            )
        dropped = spatten_filter.pruned_share(
            each.number, each.layers, average, 0.2 * average, spatten_filter.TOKENS_SPARED
        )
        tokens = each.visible.any(1).any(1).sum(-1)
        keep = (tokens * (1 - dropped)).round().long().clamp(min=1).tolist()
        chosen = [spatten_filter.cascade(i, a, n) for i, a, n in zip(importance, alive, keep, strict=True)]
        alive = torch.stack(chosen)
        left = each.visible & alive[:, None, :, None] & alive[:, None, None, :]
        scores = exact_scores(each.q, each.k)
        results.append((with_one(left, scores, each.visible), {"alive": _whole(alive[:, None, :].expand(e, h, t))}))
        importance = importance + spatten_filter.token_importance(seen_softmax(scores, left))
    return results


def _computed(result: FilterResult) -> Tensor:
    """Return the mask without the rows of dropped queries."""
    mask, counts = result
    return mask & torch.from_numpy(counts["alive"] > 0)[..., None] if "alive" in counts else mask


def _whole(counted: Tensor) -> np.ndarray:
    return counted.numpy().astype(np.int64)
