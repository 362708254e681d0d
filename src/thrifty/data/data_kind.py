"""Base class of the kinds of data. Each kind recognizes and opens its sources."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thrifty.core.errors import InfeasibleError, spelled
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.user_sources import HUB
from thrifty.data.run_data import RunData


@dataclass(frozen=True)
class DataRequest:
    """Everything that determines how the source of a recipe is opened."""

    recipe: Recipe
    objective: Objective
    """Objective of the recipe, before tokenizer, labels and patch size are set."""
    image_side: int | None
    """Side of the model's images in pixels; None if any size is possible."""
    patch_side: Callable[[ImageModelSpec], int | None]
    """Function that returns the side of a patch of the model in pixels, for images of these sizes."""
    normalized_as: Callable[[ImageModelSpec], ImageModelSpec]
    """Function that returns images with the normalization that the weights of the model expect."""
    say: Callable[[str], None]
    """Function that prints a message."""
    model_config: Callable[[], Mapping[str, Any]] = dict
    """Function that returns config.json of the recipe's pretrained model; {} without a pretrained model."""


class DataKind:
    """A kind of data that objectives learn from, listed in `training.data_opening.DATA_KINDS`."""

    name: str
    """Name of the kind in `learns_from` of objectives."""
    own_settings: tuple[str, ...] = ()
    """Data settings that this kind has and some other kinds do not have."""
    about: str
    """Noun phrase for messages, such as "images"."""
    recipe: str
    """Name of a recipe for this kind."""
    loss: str = ""
    """Objective for this kind, if it is not the objective of `recipe`."""
    is_visual: bool = False
    overrules: bool = False
    """True if a source that is mainly of this kind is refused even by kinds that can read it."""

    def holds(self, settings: DataSettings) -> bool:
        """Return True if the source of the settings is recognized as this kind without opening it."""
        raise NotImplementedError

    def is_main(self, settings: DataSettings) -> bool:
        """Return True if the source is mainly of this kind."""
        return self.holds(settings)

    def command(self, source: str) -> str:
        """Return the command or call that trains on a source of this kind."""
        option, argument = (f" --loss {self.loss}", f', loss="{self.loss}"') if self.loss else ("", "")
        return spelled(
            f"thrifty train {self.recipe} --data {shlex.quote(source)}{option}",
            f'thrifty.train(recipe="{self.recipe}", data="{source}"{argument})',
        )

    def alternative(self, settings: DataSettings, kinds: Sequence["DataKind"]) -> str:
        """Return the end of a fix: a way to read the source as one of `kinds`, or an empty string."""
        return ""

    def open(self, request: DataRequest) -> tuple[Objective, RunData]:
        """Return the objective with tokenizer, labels or patch size of the data, and the opened data.

        Raises UsageError if the source or a setting is invalid.
        """
        raise NotImplementedError


def refuse_other_data(recipe: Recipe, kinds: Sequence[DataKind], every: Iterable[DataKind]) -> None:
    """Raise InfeasibleError if a source is of another kind than `kinds`, those that the recipe trains on.

    The fix is a command for the kind of the source, which is the first in `every` that recognizes it.
    """
    for source in recipe.data.sources or (recipe.data.source,):
        settings = replace(recipe.data, source=source, sources={})
        is_readable = source.startswith(HUB) or any(kind.holds(settings) for kind in kinds)
        for other in every:
            if other in kinds:
                if other.holds(settings):
                    break
            elif (other.overrules or not is_readable) and other.is_main(settings):
                raise InfeasibleError(
                    f"{source!r} has {other.about}, but the recipe {recipe.name!r} trains on "
                    f"{' or '.join(kind.about for kind in kinds)}",
                    fix=other.command(source) + other.alternative(settings, kinds),
                )
