"""Training examples as a person can look at them: pictures, or text, with their labels and files."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import ExampleSubset
from thrifty.core.errors import RefusedError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.data.epoch_sampler import EpochSource
from thrifty.data.images.image_arrays import ImageArrays
from thrifty.data.images.image_previews import picture
from thrifty.data.run_data import RunData
from thrifty.data.text.text_data import TextData
from thrifty.data.text.text_pairs import TextPairs
from thrifty.data.text.token_windows import TokenWindows

EACH = 12
"""How many examples of each kind a run keeps for its report."""


@dataclass(frozen=True)
class ExamplePreview:
    number: int
    """Of the example in the training part of its data, from 0."""
    picture: str = ""
    """An address that holds the picture; empty for text."""
    text: str = ""
    label: str = ""
    file: str = ""


def preview_examples(data: RunData, numbers: Sequence[int]) -> list[ExamplePreview]:
    """The training examples of these numbers. Raises Refused where there is no way to show them."""
    contents = data.train.contents if isinstance(data.train, EpochSource) else None
    places = np.array(numbers, np.int64)
    if not len(places):
        return []
    if isinstance(contents, ImageArrays):
        pictures = map(picture, contents.shown(places))
        names = data.ends.labels if isinstance(data.ends, ImageModelSpec) else ()
        labels = [names[label] if names else "" for label in contents.labels[places].tolist()]
        files = [contents.names[place] if contents.names else "" for place in places.tolist()]
        return [
            ExamplePreview(*each) for each in zip(numbers, pictures, [""] * len(places), labels, files, strict=True)
        ]
    if isinstance(contents, TokenWindows) and isinstance(data, TextData):
        return [
            ExamplePreview(number, text=data.tokenizer.decode(tokens))
            for number, tokens in zip(numbers, contents.at(places).tolist(), strict=True)
        ]
    if isinstance(contents, TextPairs) and isinstance(data, TextData):
        rows = contents.fields(places)
        sides = zip(numbers, rows["source"].tolist(), rows["tokens"][:, 1:].tolist(), strict=True)
        return [
            ExamplePreview(
                number, text=" → ".join(data.tokenizer.decode(_filled(side, contents.end_of_text)) for side in both)
            )
            for number, *both in sides
        ]
    raise RefusedError("examples of this kind cannot be shown", fix="look at images or text")


def _filled(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


def selection(data: RunData, choice: ExampleSubset) -> dict[str, Any]:
    """What a run that trains on some of its examples keeps for its report: counts by label, and examples of those that
    are kept and of those that are left out, the hardest first."""
    there = data.train.example_index()
    kept = torch.zeros(there.count, dtype=torch.bool)
    kept[choice.kept] = True
    names = data.ends.labels if isinstance(data.ends, ImageModelSpec) else ()
    rows: list[tuple[str, int, int]] = []
    if there.labels is not None:
        for number, name in enumerate(names):
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
        found = preview_examples(data, numbers.tolist())
    except RefusedError:  # a report goes without
        return []
    told = [None] * len(found) if scores is None else scores[numbers].tolist()
    return [{**asdict(each), "score": score} for each, score in zip(found, told, strict=True)]
