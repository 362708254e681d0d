"""Previews of kept and left-out training examples."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from thrifty.core.batches import ExampleSubset
from thrifty.core.errors import RefusedError
from thrifty.data.run_data import RunData

EACH = 12
"""Number of hardest examples, and also number of easiest examples, in a report."""


def selection(data: RunData, choice: ExampleSubset) -> dict[str, Any]:
    """Return the data of the report on a subset of the training examples.

    The report contains counts per label, and previews of kept and left-out examples, hardest first.
    """
    index = data.train.example_index()
    kept = torch.zeros(index.count, dtype=torch.bool)
    kept[choice.kept] = True
    rows: list[tuple[str, int, int]] = []
    if index.labels is not None:
        for number, name in enumerate(index.label_names):
            own = index.labels == number
            rows.append((name, int(own.sum()), int((own & kept).sum())))
    groups = {"kept": kept, "left out": ~kept}
    return {
        "examples": index.count,
        "kept": len(choice.kept),
        "labels": rows,
        "shown": {name: _spread(data, own, choice.scores) for name, own in groups.items()},
    }


def _spread(data: RunData, own: Tensor, scores: Tensor | None) -> list[dict[str, Any]]:
    """Return previews of the hardest and easiest examples in the mask `own`. Without scores, the examples are evenly
    spaced."""
    numbers = own.nonzero().squeeze(1)
    if scores is not None:
        numbers = numbers[scores[numbers].argsort(descending=True, stable=True)]
    if len(numbers) > 2 * EACH:
        ends = torch.cat([numbers[:EACH], numbers[-EACH:]])
        numbers = ends if scores is not None else numbers[torch.linspace(0, len(numbers) - 1, 2 * EACH).long()]
    try:
        previews = data.previews(numbers.tolist())
    except RefusedError:  # the report then has no previews
        return []
    shown = [None] * len(previews) if scores is None else scores[numbers].tolist()
    return [{**asdict(each), "score": score} for each, score in zip(previews, shown, strict=True)]
