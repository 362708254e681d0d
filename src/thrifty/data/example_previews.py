"""Previews of the training examples that a run keeps and of those that it leaves out."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thrifty.core.batches import ExampleSubset
from thrifty.core.errors import RefusedError
from thrifty.data.run_data import RunData

EACH = 12
"""How many examples of each kind a run keeps for its report."""


def selection(data: RunData, choice: ExampleSubset) -> dict[str, Any]:
    """What a run that trains on some of its examples keeps for its report: counts by label, and examples of those that
    are kept and of those that are left out, the hardest first."""
    there = data.train.example_index()
    kept = torch.zeros(there.count, dtype=torch.bool)
    kept[choice.kept] = True
    rows: list[tuple[str, int, int]] = []
    if there.labels is not None:
        for number, name in enumerate(there.label_names):
            own = there.labels == number
            rows.append((name, int(own.sum()), int((own & kept).sum())))
    groups = {"kept": kept, "left out": ~kept}
    return {
        "examples": there.count,
        "kept": len(choice.kept),
        "labels": rows,
        "shown": {name: _spread(data, own, choice.scores) for name, own in groups.items()},
    }


def _spread(data: RunData, own: Tensor, scores: Tensor | None) -> list[dict[str, Any]]:
    """Some of these examples: the hardest and the easiest, or without scores some that lie equally far apart."""
    numbers = own.nonzero().squeeze(1)
    if scores is not None:
        numbers = numbers[scores[numbers].argsort(descending=True, stable=True)]
    if len(numbers) > 2 * EACH:
        ends = torch.cat([numbers[:EACH], numbers[-EACH:]])
        numbers = ends if scores is not None else numbers[torch.linspace(0, len(numbers) - 1, 2 * EACH).long()]
    try:
        previews = data.previews(numbers.tolist())
    except RefusedError:  # a report goes without
        return []
    told = [None] * len(previews) if scores is None else scores[numbers].tolist()
    return [{**asdict(each), "score": score} for each, score in zip(previews, told, strict=True)]
