"""Protocol of a run's opened data, for every kind of data."""

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
    """A training example for display: a picture or a text, with its label and file."""

    number: int
    """Number of the example in the training part, from 0."""
    picture: str = ""
    """Data URL of the picture; empty for text."""
    text: str = ""
    label: str = ""
    file: str = ""


class RunData(Protocol):
    """Training and held-out examples of a run, with their identity and their description."""

    @property
    def train(self) -> BatchSource: ...

    @property
    def held_out(self) -> HeldOutExamples: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """Values that a resumed run must match: the sha256 of each opened file, the names of labels."""

    @property
    def ends(self) -> ModelSpec:
        """Required inputs and outputs of a model."""

    @property
    def example_unit(self) -> int:
        """Units of one example in a budget of tokens."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Reference values in the run summary, such as the entropy of the labels."""

    def description(self) -> dict[str, Any]:
        """Return sizes and statistics for `thrifty explain`."""

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        """Return previews of the training examples with these numbers. Raises RefusedError if there are none."""

    def pictures(self, inputs: Tensor) -> list[str]:
        """Return a data URL of a picture for each input (b, c, h, w). Raises RefusedError for data without images."""

    def metadata(self) -> dict[str, str]:
        """Return the texts, by file name, of the metadata files of a run folder that inference requires."""

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        """Raise UsageError if a model's inputs or outputs have another meaning than in the run folder `old`.

        `before` is the identity of the data of that run.
        """
