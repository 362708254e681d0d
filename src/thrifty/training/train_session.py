"""A run in training: its data, folder, settings and observers."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from thrifty.composition.compose import Run
from thrifty.core.batches import Batch
from thrifty.core.recipe import Recipe
from thrifty.training.loop import Record
from thrifty.training.progress_display import ProgressDisplay
from thrifty.training.run_folder import RunFolder
from thrifty.training.time_budget import RunLength, TimeBudget

Steps = Generator[Record, None, dict[str, Any]]
"""Generator of a run's records, one per step. Its return value is the summary. A generator that is closed early saves
the run."""
Observer = Callable[[Record], Any]
"""Function that receives each record, with the evaluation if one was due. The run stops if the function returns
False."""


@dataclass
class TrainSession:
    """A run in training: its data, folder, settings and observers."""

    resume_facts: Mapping[str, Any]
    """JSON values stored in each checkpoint in addition to the state: recipe, identity of the data. A resume compares
    these values to detect changes."""
    recipe: Recipe
    run: Run
    held_out: Sequence[Batch]
    folder: RunFolder
    facts: dict[str, Any] = field(default_factory=dict)
    """Known values that the summary repeats: facts of the data (unigram_entropy, bytes_per_token; label_entropy,
    unit), predicted_memory, peak_flops_per_second, flops_per_step."""
    notices: Sequence[str] = ()
    """Notices for the user before the first step, such as a damaged checkpoint that was skipped."""
    display: ProgressDisplay = field(default_factory=lambda: ProgressDisplay(quiet=True))
    remedy: Callable[[float], str] | None = None
    """Function that maps the available bytes to the fix for an out-of-memory error."""
    drawn: Callable[[Tensor], list[str]] | None = None
    """Function that maps images (b, c, h, w), scaled as the model's inputs, to data URLs; None for data without
    images."""
    observers: Sequence[Observer] = ()
    time_budget: TimeBudget | None = None
    """Budget in seconds; None if the number of steps is fixed."""
    lengths: list[RunLength] = field(default_factory=list)
    """Numbers of steps of the run so far: the first, and each change."""
    recorded: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Changes of the number of steps that an interrupted run recorded after its last checkpoint, by step."""
