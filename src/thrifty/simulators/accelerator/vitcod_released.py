"""What the released simulator of ViTCoD counts for a fixed mask, quirks included, and what each quirk is worth.

Its rules in our words (You et al., HPCA 2023; graded R): every transfer takes whole cycles of its own; one head's mask
stands for all heads, which share the multipliers evenly; transfers overlap with decoding and computing over the whole
network and not within it; queries come in once; bandwidth is 76.8 times 2³⁰ bytes/s. Attention has 64 x 64
multipliers in the log that was published with it, where the code has 64 x 8 by now, as the linear layers have in both.
The log is of DeiT-Tiny's mask at 95 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.designs.vitcod import split_pairs

LINES, LINE, LIMIT = 64, 8, 50
"""Lines, multipliers of each for the linear layers, and what a global token has more pairs than."""
CLOCK = 5e8
WIDTH = 64


@dataclass(frozen=True)
class ReleasedRules:
    """The released simulator's as they are; each may be set right."""

    every_head: bool = False
    """Whether each head's own mask counts, in place of the first one's for all."""
    within_layers: bool = False
    """Whether transfers overlap with a layer's computation only, in place of any layer's."""
    fluid: bool = False
    """Whether transfers share cycles, in place of each being rounded up."""
    decimal: bool = False
    """Whether a GB is 10⁹ bytes, in place of 2³⁰."""
    line: int = 64
    """Multipliers of a line, for attention."""
    value_reads: float = 1.0
    """How often values of the sparser part are read; the log's earlier run takes 1.5."""


@dataclass(frozen=True)
class LayerCycles:
    """Cycles of a layer's attention."""

    load: float
    decode: float
    scores: float
    values: float

    @property
    def work(self) -> float:
        return self.decode + self.scores + self.values


@dataclass(frozen=True)
class CountedCycles:
    """Of a network's attention."""

    layers: tuple[LayerCycles, ...]
    total: float

    @property
    def load(self) -> float:
        return sum(layer.load for layer in self.layers)

    @property
    def decode(self) -> float:
        return sum(layer.decode for layer in self.layers)

    @property
    def compute(self) -> float:
        return sum(layer.scores + layer.values for layer in self.layers)


def attention_cycles(trace: AttentionTrace, rules: ReleasedRules | None = None) -> CountedCycles:
    """Cycles of the attention of fixed masks; the first example's. Raises UsageError for heads of another width or for
    heads that no line is left for."""
    rules = rules or ReleasedRules()
    layers = []
    for layer in trace.layers:
        if layer.width != WIDTH or layer.heads > LINES * LINE:
            raise UsageError(f"layer {layer.name}: the released simulator knows heads of {WIDTH} only")
        tokens = int(layer.query_lengths[0])
        found = split_pairs(layer.kept()[: layer.heads], LIMIT)
        heads = list(zip(*(part.tolist() for part in found), strict=True))[: None if rules.every_head else 1]
        each = [head_cycles(tokens, layer.heads, dense, sparse, rules) for dense, sparse in heads]
        layers.append(_mean(each))
    if rules.within_layers:
        return CountedCycles(tuple(layers), sum(max(layer.load, layer.work) for layer in layers))
    return CountedCycles(tuple(layers), max(sum(layer.load for layer in layers), sum(layer.work for layer in layers)))


def _mean(each: Sequence[LayerCycles]) -> LayerCycles:
    """Heads run side by side on a share of the multipliers each, which is as long as their mean on all of them."""
    values = np.array([[cycles.load, cycles.decode, cycles.scores, cycles.values] for cycles in each])
    return LayerCycles(*values.mean(0).tolist())


def head_cycles(tokens: int, heads: int, dense: int, sparse: int, rules: ReleasedRules) -> LayerCycles:
    """Of `dense` global tokens and `sparse` other pairs, with all heads alike."""
    code = heads * 2 / 3
    decoding = math.ceil(code * WIDTH / (LINES * rules.line // heads))
    vector = _cycles(code * WIDTH, rules)
    decoder = _cycles(code * heads, rules)  # through one head's share of the bandwidth
    rest = tokens - dense
    load, decode = (dense + rest) * vector + decoder * (rest > 0), (dense + rest) * decoding
    again = 1.0 if dense else sparse / rest
    load += tokens * vector * again + decoder * (1 + (dense > 0))
    decode += tokens * decoding * again
    load += (dense + rules.value_reads * rest) * _cycles(heads * WIDTH, rules)
    lines = int(LINES * dense * tokens / (sparse + dense * tokens))
    share = rules.line / heads
    depth = math.ceil(WIDTH / share)
    scores, values = [0], [0]
    if dense:
        lines = max(lines, 1)
        scores.append(dense * math.ceil(tokens / lines) * depth)
        values.append(math.ceil(tokens * WIDTH * dense / int(lines * share)))
    if sparse:
        left = max(LINES - lines, 1)
        scores.append(math.ceil(sparse / left) * depth)
        values.append(math.ceil(sparse * WIDTH / int(left * share)))
    return LayerCycles(load, decode, max(scores), max(values))


def _cycles(size: float, rules: ReleasedRules) -> float:
    cycles = size / (76.8 * (1e9 if rules.decimal else 2**30)) * CLOCK
    return cycles if rules.fluid else math.ceil(cycles)


def linear_cycles(tokens: int, heads: int, layers: int) -> tuple[int, int]:
    """Cycles of the projections around attention, and of the two layers after it, of a model of heads of 64."""
    width, all_of_them = heads * WIDTH, LINES * LINE
    share = all_of_them // heads
    projections = 3 * tokens * (width * WIDTH // share) + tokens * width * WIDTH // share
    return layers * projections, layers * 2 * (4 * tokens * width**2 // all_of_them)


FIXES = {
    "as released": {},
    "every head's own mask": {"every_head": True},
    "overlap within a layer only": {"within_layers": True},
    "transfers share cycles": {"fluid": True},
    "a GB is 10⁹ bytes": {"decimal": True},
    "64 x 8 multipliers": {"line": LINE},
}


def fixes(trace: AttentionTrace) -> dict[str, CountedCycles]:
    """As released, with each quirk set right alone, and with all of them."""
    every = {key: value for changes in FIXES.values() for key, value in changes.items()}
    return {
        name: attention_cycles(trace, replace(ReleasedRules(), **changes))
        for name, changes in {**FIXES, "all of these": every}.items()
    }
