"""A run's opened data, of whatever kind: all that preparing, training, explaining and resuming use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from thrifty.core.batches import BatchSource
from thrifty.core.model_spec import ModelSpec
from thrifty.data.epoch_sampler import HeldOutExamples


@dataclass(frozen=True)
class ExamplePreview:
    """A training example as a person can look at it: a picture or a text, with its label and file."""

    number: int
    """Of the example in the training part of its data, from 0."""
    picture: str = ""
    """An address that holds the picture; empty for text."""
    text: str = ""
    label: str = ""
    file: str = ""


class RunData(Protocol):
    @property
    def train(self) -> BatchSource: ...

    @property
    def held_out(self) -> HeldOutExamples: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """What a resumed run must find again: the sha256 of each file that was opened, the names of labels."""

    @property
    def ends(self) -> ModelSpec:
        """What is required of a model's inputs and outputs."""

    @property
    def example_unit(self) -> int:
        """What one example counts as in a budget of tokens."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a run's summary says of it, to tell whether a loss is a good one."""

    def description(self) -> dict[str, Any]:
        """Sizes and statistics, for `thrifty explain`."""

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        """Show the training examples of these numbers. Raises RefusedError where there is no way to show them."""

    def pictures(self, inputs: Tensor) -> list[str]:
        """Draw a model's inputs (b, c, h, w) as addresses that hold a picture each. Raises RefusedError where the data
        are no images."""

    def metadata(self) -> dict[str, str]:
        """Return the texts, by file name, of the metadata files of a run folder that inference needs."""

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        """Raises UsageError where a model's inputs and outputs would mean something else than in the run folder `old`,
        whose data had the identity `before`."""
