"""Support for `thrifty data prune`: counts of kept examples per label, and the `--with` option of a selection."""

import json
import shlex
from typing import NamedTuple

from torch import Tensor

from thrifty.core.plain_values import to_data
from thrifty.core.score_file import ExampleScores
from thrifty.techniques.data_selection.prune import PrunedExamples


class LabelCount(NamedTuple):
    """Number of examples of one label before and after pruning. An empty label counts all examples."""

    label: str
    there: int
    kept: int


def count_labels(scores: ExampleScores, kept: Tensor) -> list[LabelCount]:
    """Count all examples and the kept examples of each label. `kept` (k,) has the indices of k kept examples."""
    if scores.labels is None:
        return [LabelCount("", len(scores), len(kept))]
    count = max(len(scores.facts.label_names), int(scores.labels.max()) + 1)
    whole, rest = (labels.bincount(minlength=count).tolist() for labels in (scores.labels, scores.labels[kept]))
    return [LabelCount(scores.label(label), whole[label], rest[label]) for label in range(count)]


def changed_settings(prune: PrunedExamples) -> dict[str, object]:
    """Return the settings that differ from their default values."""
    default = to_data(PrunedExamples())
    return {name: value for name, value in to_data(prune).items() if value != default[name]}


def format_option(prune: PrunedExamples) -> str:
    """Return the selection as a shell argument of --with. Texts are quoted, because a hash may start with digits."""
    settings = ",".join(f"{name}={json.dumps(value)}" for name, value in changed_settings(prune).items())
    return shlex.quote(f"{prune.name}:{settings}")
