"""Models, data, losses and metrics that are passed from Python, and what a run folder records of them."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from thrifty.core.errors import UsageError
from thrifty.core.recipe import PythonObjects, Recipe

BuildModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class UserObjects:
    """Model, data, loss and metrics in place of a recipe's; see `thrifty.train`."""

    model: BuildModel | None = None
    data: Any = None
    held_out: Any = None
    loss: Callable[[nn.Module, Any], Any] | None = None
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None

    def described(self) -> PythonObjects:
        """Return the names and fingerprints of the objects, as a run folder records them."""
        singles = {name: getattr(self, name) for name in ("model", "data", "held_out", "loss", "collate")}
        names = {name: described(value) for name, value in singles.items() if value is not None}
        metrics = tuple(f"{name} {described(function)}" for name, function in sorted(self.metrics.items()))
        return PythonObjects(**names, metrics=metrics)

    def for_recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the names of these objects. Raises UsageError if it names one that is not passed."""
        own = self.described()
        for name, recorded in asdict(recipe.python).items():
            if recorded and not getattr(own, name):
                first = (recorded if isinstance(recorded, str) else recorded[0]).rpartition(" ")[0]
                raise UsageError(
                    f"the recipe has {name} from Python ({first}), which a file never runs by itself",
                    fix=f"pass it: thrifty.train(…, {name}=…) or thrifty.resume(…, {name}=…)",
                )
        return replace(recipe, python=own)


def described(value: Any) -> str:
    """Return the name of a function, or of an object's class, and the first digits of a hash of its source."""
    function = getattr(value, "func", value)  # what a partial calls
    named = function if hasattr(function, "__qualname__") else type(function)
    try:
        text = inspect.getsource(named)
    except (OSError, TypeError):  # typed at a prompt, or compiled
        code = getattr(named, "__code__", None)
        text = repr((code.co_code, code.co_consts)) if code else named.__qualname__
    return f"{named.__module__}:{named.__qualname__} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
