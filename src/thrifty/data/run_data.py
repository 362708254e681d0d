"""Protocol of the opened data of a run, for all kinds of data."""

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
    """A training example for display: a picture or a text, with label and file name."""

    number: int
    """Number of the example in the training part, from 0."""
    picture: str = ""
    """Data URL of the picture; empty for text."""
    text: str = ""
    label: str = ""
    file: str = ""


class RunData(Protocol):
    """Training and held-out examples of a run, with identity and description."""

    @property
    def train(self) -> BatchSource: ...

    @property
    def held_out(self) -> HeldOutExamples: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """Values that must not change when a run resumes: the sha256 of each file, and the label names."""

    @property
    def ends(self) -> ModelSpec:
        """Inputs and outputs that a model for these data must have."""

    @property
    def example_unit(self) -> int:
        """Number of tokens that a budget counts for one example."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Reference values for the run summary, such as the entropy of the labels."""

    def description(self) -> dict[str, Any]:
        """Return sizes and statistics for `thrifty explain`."""

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        """Return previews of the training examples with `numbers`. Raises RefusedError for data without previews."""

    def pictures(self, inputs: Tensor) -> list[str]:
        """Return a data URL of a picture for each input (b, c, h, w). Raises RefusedError for data without images."""

    def metadata(self) -> dict[str, str]:
        """Return the metadata files that inference requires in a run folder, as text by file name."""

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        """Raise UsageError if token ids or outputs mean something else than in the run folder `old`.

        `before` is the data identity of the old run.
        """
