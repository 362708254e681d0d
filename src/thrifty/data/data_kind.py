"""Base class of the kinds of data. Each kind recognizes and opens its sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.data.run_data import RunData


@dataclass(frozen=True)
class DataRequest:
    """Everything that determines how the source of a recipe is opened."""

    recipe: Recipe
    objective: Objective
    """Objective of the recipe, before tokenizer, labels and patch size are set."""
    image_sizes: Callable[[], tuple[int | None, int | None]]
    """Function that returns the image size and the patch size of the recipe's model, in pixels per side."""
    say: Callable[[str], None]
    """Function that prints a message."""
    model_config: Callable[[], Mapping[str, Any]] = dict
    """Function that returns config.json of the recipe's pretrained model; {} without a pretrained model."""


class DataKind:
    """A kind of data that objectives learn from, listed in `training.run_setup.DATA_KINDS`."""

    name: str
    """Name of the kind in `learns_from` of objectives."""
    own_settings: tuple[str, ...] = ()
    """Data settings that this kind has and some other kinds do not have."""

    def holds(self, source: str) -> bool:
        """Return True if a source is recognized as this kind without opening it."""
        return False

    def open(self, request: DataRequest) -> tuple[Objective, RunData]:
        """Return the objective with tokenizer, labels or patch size of the data, and the opened data.

        Raises UsageError if the source or a setting is invalid.
        """
        raise NotImplementedError
