"""Conversion of LoRA factors between Thrifty's layers and PEFT's pairs of A and B, and PEFT's settings of rank and
alpha.

A fused layer with one A becomes one pair per exported layer. If an exported layer is fused and its parts have separate
A in Thrifty, the parts become one pair. The rank of this pair is a multiple of the parts' rank, and its B has blocks of
zeros.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.modeling.lora_layers import LORA, LoraFactors, factors_of
from thrifty.peft_format.layer_naming import LayerTarget


@dataclass(frozen=True)
class LoraPair:
    """Factors of one low-rank update: A (rank, in), B (out, rank) and alpha. Alpha and the rank determine the scale."""

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def split_pairs(layer: nn.Module, name: str, place: LayerTarget) -> Iterator[tuple[str, LoraPair]]:
    """Yield the name and the LoRA pair of each exported layer of an adapter on a layer of Thrifty."""
    own: LoraFactors = LORA.of(layer).factors[name]
    a, b, scale = factors_of(layer, name)
    if len(place.theirs) == 1:
        yield place.theirs[0], LoraPair(a, b, _alpha(scale, a.shape[0], own.rank_stabilized))
        return
    if own.sizes and own.sizes != place.rows:
        raise RefusedError(
            f"{' and '.join(place.theirs)} do not have the output sizes of their factors",
            fix="merge the adapter into the weights and export the model",
        )
    for index, (theirs, rows) in enumerate(zip(place.theirs, b.split(list(place.rows)), strict=True)):
        if not own.sizes:
            yield theirs, LoraPair(a, rows, own.alpha)
        elif index in own.chosen:
            start = own.rank * own.chosen.index(index)
            thin = slice(start, start + own.rank)
            yield theirs, LoraPair(a[thin], rows[:, thin], own.alpha)


def _alpha(scale: float, rank: int, rank_stabilized: bool) -> float:
    alpha = scale * (math.sqrt(rank) if rank_stabilized else rank)
    return round(alpha) if math.isclose(alpha, round(alpha), rel_tol=1e-12) else alpha


def join_pairs(
    parts: Mapping[int, LoraPair], place: LayerTarget, dropout: float, rank_stabilized: bool
) -> tuple[LoraFactors, Tensor, Tensor]:
    """Return the factors of a layer of Thrifty from the pairs of its exported layers. Raise RefusedError if the pairs
    differ in rank or alpha."""
    order = sorted(parts)
    first = parts[order[0]]
    if any((part.rank, part.alpha) != (first.rank, first.alpha) for part in parts.values()):
        raise RefusedError(
            f"{' and '.join(place.theirs)} have different ranks or alphas, but are one layer in Thrifty's model",
            fix="load it onto the model of transformers",
        )
    sizes = place.rows if len(place.theirs) > 1 else ()
    factors = LoraFactors(first.rank, first.alpha, dropout, rank_stabilized, sizes, tuple(order) if sizes else ())
    return factors, torch.cat([parts[i].a for i in order]), torch.cat([parts[i].b for i in order])


def rank_settings(pairs: Mapping[str, LoraPair]) -> dict[str, Any]:
    """Return PEFT's settings: the most common `r` and `lora_alpha`, and patterns for layers with other values."""
    common = Counter((pair.rank, pair.alpha) for pair in pairs.values()).most_common(1)[0][0]
    by_word: dict[str, set[tuple[int, float]]] = {}
    for path, pair in pairs.items():
        by_word.setdefault(path.rpartition(".")[2], set()).add((pair.rank, pair.alpha))
    ranks, alphas = {}, {}
    for path, pair in pairs.items():
        word = path.rpartition(".")[2]
        key = word if len(by_word[word]) == 1 else path
        if pair.rank != common[0]:
            ranks[key] = pair.rank
        if pair.alpha != common[1]:
            alphas[key] = pair.alpha
    return {"r": common[0], "lora_alpha": common[1], "rank_pattern": ranks, "alpha_pattern": alphas}


def rank_and_alpha(config: Mapping[str, Any], path: str) -> tuple[int, float]:
    """Return rank and alpha of one layer from the settings; 8 and 8 by default, as in PEFT."""
    return (
        _by_pattern(config.get("rank_pattern"), path, config.get("r", 8)),
        _by_pattern(config.get("alpha_pattern"), path, config.get("lora_alpha", 8)),
    )


def _by_pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    try:
        matches = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", path))
        value = next(matches, default)
    except re.error as error:
        raise UsageError(
            f"adapter_config.json has an invalid pattern: {error}", fix="fetch the folder again"
        ) from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        what = f"adapter_config.json has {value!r} as rank or alpha of {path}, not a finite number"
        raise IntegrityError(what, fix="fetch the folder again")
    return value


def targets(wanted: Iterable[str], modules: Iterable[str]) -> list[str] | str:
    """Return PEFT's `target_modules` that match only the `wanted` modules: last name components, full paths, or a
    pattern."""
    wanted = set(wanted)
    for words in ({path.rpartition(".")[2] for path in wanted}, wanted):
        if {path for path in modules if any(f".{path}".endswith(f".{word}") for word in words)} == wanted:
            return sorted(words)
    return "|".join(re.escape(path) for path in sorted(wanted))
