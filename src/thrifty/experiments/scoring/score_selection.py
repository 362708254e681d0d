"""`thrifty data prune`: what a choice by scores keeps of each label, and how a recipe names it."""

import json
import shlex
from typing import NamedTuple

from torch import Tensor

from thrifty.core.plain_values import to_data
from thrifty.core.score_file import ExampleScores
from thrifty.techniques.data_selection.prune import PrunedExamples


class LabelCount(NamedTuple):
    """Examples of one label; the label of all is empty."""

    label: str
    there: int
    kept: int


def count_labels(scores: ExampleScores, kept: Tensor) -> list[LabelCount]:
    """How many examples of each label there are, and are among those with the numbers `kept` (k,)."""
    if scores.labels is None:
        return [LabelCount("", len(scores), len(kept))]
    count = max(len(scores.facts.label_names), int(scores.labels.max()) + 1)
    whole, rest = (labels.bincount(minlength=count).tolist() for labels in (scores.labels, scores.labels[kept]))
    return [LabelCount(scores.label(label), whole[label], rest[label]) for label in range(count)]


def changed_settings(prune: PrunedExamples) -> dict[str, object]:
    """The settings of a choice that are not the defaults."""
    default = to_data(PrunedExamples())
    return {name: value for name, value in to_data(prune).items() if value != default[name]}


def format_option(prune: PrunedExamples) -> str:
    """The choice as what follows --with in a shell. Texts are in quotes: a hash may begin like a number."""
    settings = ",".join(f"{name}={json.dumps(value)}" for name, value in changed_settings(prune).items())
    return shlex.quote(f"{prune.name}:{settings}")
