"""Kinds of data: each recognizes and opens the sources that it is for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.objective import Objective
from thrifty.core.recipe import Recipe
from thrifty.data.run_data import RunData


@dataclass(frozen=True)
class DataRequest:
    """All that decides how the source of a recipe is opened."""

    recipe: Recipe
    objective: Objective
    """The recipe's, before it knows of the data."""
    image_sizes: Callable[[], tuple[int | None, int | None]]
    """Returns the sides of the images and of the patches that the recipe's model was made for."""
    say: Callable[[str], None]
    model_config: Callable[[], Mapping[str, Any]] = dict
    """Returns config.json of the trained model that the recipe starts from, empty where there is none."""


class DataKind:
    """A kind of data that objectives learn from; each stands in `training.run_setup.DATA_KINDS`."""

    name: str
    """As objectives name it in `learns_from`."""
    own_settings: tuple[str, ...] = ()
    """Those data settings it has that not every kind has."""

    def holds(self, source: str) -> bool:
        """Return whether a source is seen to be of this kind before it is opened."""
        return False

    def open(self, request: DataRequest) -> tuple[Objective, RunData]:
        """Open the data; returns the objective as it is for them, and held-out examples as that makes them.

        Raises UsageError where the source or a setting is not what it must be.
        """
        raise NotImplementedError
