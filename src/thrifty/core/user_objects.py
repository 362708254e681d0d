"""Models, data, losses and metrics that are passed from Python, and what a run folder records of them."""

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any

from torch import nn

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.out_of_memory import is_out_of_memory

BuildModel = Callable[..., nn.Module]


@dataclass(frozen=True)
class PythonObjects:
    """Names and fingerprints of objects that were passed from Python in place of what a recipe can spell: a record, so
    that a resumed run can tell what changed. None of them is ever imported."""

    model: str = ""
    data: str = ""
    held_out: str = ""
    loss: str = ""
    collate: str = ""
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class UserObjects:
    """Model, data, loss and metrics in place of a recipe's; see `thrifty.recipe`."""

    model: nn.Module | BuildModel | None = None
    """A function that builds the model, or a module, whose weights are where training starts."""
    data: Any = None
    held_out: Any = None
    loss: Callable[[nn.Module, Any], Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None

    @cached_property
    def described(self) -> PythonObjects:
        """The names and fingerprints of the objects, as a run folder records them."""
        singles = {name: getattr(self, name) for name in ("model", "data", "held_out", "loss", "collate")}
        names = {name: _described(value) for name, value in singles.items() if value is not None}
        metrics = tuple(f"{name} {_described(function)}" for name, function in sorted(self.metrics.items()))
        return PythonObjects(**names, metrics=metrics)

    def build_model(self, **arguments: Any) -> nn.Module:
        """Return the model that the user's function builds, or a copy of their module. Raises UsageError where the
        function fails, or returns no module."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        assert self.model is not None
        name = reference(self.model)
        try:
            model = self.model(**arguments)
        except Exception as error:
            if isinstance(error, ThriftyError) or is_out_of_memory(error):
                raise
            raise UsageError(
                f"{name} builds no model: {type(error).__name__}: {error}",
                fix="mend it until it can be called with the arguments of the recipe alone, also more than once",
            ) from error
        if not isinstance(model, nn.Module):
            what = f"{name} gives a {type(model).__name__}, and no torch.nn.Module"
            raise UsageError(what, fix="return the model itself")
        return model


def reference(value: Any) -> str:
    """Return the name of a function, or of an object's class, as package.module:name."""
    named = _named(value)
    return f"{named.__module__}:{named.__qualname__}"


def _named(value: Any) -> Any:
    function = getattr(value, "func", value)  # what a partial calls
    return function if hasattr(function, "__qualname__") else type(function)


def _described(value: Any) -> str:
    """Return the name of a value, and the first digits of a hash of its source."""
    parts = [getattr(value, each.name) for each in fields(value)] if is_dataclass(value) else []
    if (
        parts and not isinstance(value, type) and all(map(callable, parts))
    ):  # a metric that is put together of functions
        return f"{reference(value)} of {' and '.join(map(_described, parts))}"
    named = _named(value)
    try:
        text = inspect.getsource(named)
    except (OSError, TypeError):  # typed at a prompt, or compiled
        code = getattr(named, "__code__", None)
        text = repr((code.co_code, code.co_consts)) if code else named.__qualname__
    return f"{reference(value)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
