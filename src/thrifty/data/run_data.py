"""What a run's data is, of whatever kind: all that preparing, training, explaining and resuming ask of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from thrifty.core.batches import BatchSource
from thrifty.core.model_spec import ModelSpec
from thrifty.data.epoch_sampler import HeldOutExamples


class RunData(Protocol):
    @property
    def train(self) -> BatchSource: ...

    @property
    def held_out(self) -> HeldOutExamples: ...

    @property
    def identity(self) -> Mapping[str, str]:
        """What a resumed run must find again: the sha256 of each file that was opened, the names of labels."""
        ...

    @property
    def ends(self) -> ModelSpec:
        """What is asked of a model's inputs and outputs."""
        ...

    @property
    def example_unit(self) -> int:
        """What one example counts as in a budget of tokens."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a run's summary says of it, to tell whether a loss is a good one."""
        ...

    def description(self) -> dict[str, Any]:
        """Sizes and statistics, for `thrifty explain`."""
        ...

    def write_metadata(self, folder: Path) -> None:
        """Write into a run folder what a trained model is used with."""
        ...

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        """Raises UsageError where a model's inputs and outputs would mean something else than in the run folder `old`,
        whose data had the identity `before`."""
        ...
