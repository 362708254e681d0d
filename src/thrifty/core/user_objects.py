"""Models, data, losses and metrics that are passed from Python, and what a run folder records of them."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from thrifty.core.errors import ThriftyError, UsageError, did_you_mean, spelled
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.user_sources import description, import_function, import_named, reference, source_fingerprints

BuildModel = Callable[..., nn.Module]


@dataclass(frozen=True)
class PythonObjects:
    """Names of objects that were passed from Python in place of what a recipe can spell, and fingerprints of their
    source: a record, so that a resumed run can tell what changed. None of them is ever imported."""

    data: str = ""
    held_out: str = ""
    loss: str = ""
    collate: str = ""
    metrics: tuple[str, ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict, hash=False)
    """A part of a hash of each function and class of the user's own that they consist of."""


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
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The names by which some of them were imported."""

    @classmethod
    def given(cls, **objects: Any) -> "UserObjects":
        """Return objects, of which a text is the name by which one is imported. A dataset is the value of that name, or
        what a function or a class of that name returns without arguments."""
        names = {name: value for name, value in objects.items() if isinstance(value, str)}
        imported: dict[str, Any] = {}
        for name, text in names.items():
            is_data = name in ("data", "held_out")
            imported[name] = _dataset(text) if is_data else import_function(text)
        return cls(**{**objects, **imported}, names=names)

    def of_model(self) -> "UserObjects":
        """Return the model alone."""
        return UserObjects(self.model, names={name: text for name, text in self.names.items() if name == "model"})

    @property
    def is_passed(self) -> bool:
        """True if there is any object."""
        return bool(self.build) or self.described != PythonObjects()

    @property
    def build(self) -> str:
        """The name of the model's function or class, empty without a model."""
        return self.names.get("model") or ("" if self.model is None else reference(self.model))

    @cached_property
    def described(self) -> PythonObjects:
        """The names and fingerprints of the objects, as a run folder records them."""
        singles = {name: getattr(self, name) for name in ("data", "held_out", "loss", "collate")}
        passed = {name: value for name, value in singles.items() if value is not None}
        names = {name: self.names.get(name) or reference(value) for name, value in passed.items()}
        metrics = tuple(f"{name} {description(function)}" for name, function in sorted(self.metrics.items()))
        makers = [import_named(name) for name in self.names.values()]
        values = [*makers, *passed.values(), *self.metrics.values(), *([] if self.model is None else [self.model])]
        return PythonObjects(**names, metrics=metrics, sources=source_fingerprints(values))

    def build_model(self, arguments: Mapping[str, Any] | None = None) -> nn.Module:
        """Return the model that the user's function builds, or a copy of their module. Raises UsageError where the
        function fails, or returns no module, or one with lazy layers."""
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self._called(arguments)
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise UsageError(
                f"{self.build} has lazy layers without weights, such as {lazy[0]!r}",
                fix="run a batch through the model where it is built: model(inputs)",
            )
        return model

    def _called(self, arguments: Mapping[str, Any] | None) -> nn.Module:
        assert self.model is not None and not isinstance(self.model, nn.Module)
        _refuse_arguments(self.build, self.model, arguments or {})
        try:
            model = self.model(**(arguments or {}))
        except Exception as error:
            if isinstance(error, ThriftyError) or is_out_of_memory(error):
                raise
            raise UsageError(
                f"{self.build} builds no model: {type(error).__name__}: {error}; it was called with "
                f"{_shown(arguments or {})}",
                fix=f"mend it, or its arguments: it takes {_parameters(self.model)}",
            ) from error
        if not isinstance(model, nn.Module):
            what = f"{self.build} gives a {type(model).__name__}, and no torch.nn.Module"
            raise UsageError(what, fix="return the model itself")
        return model


def _refuse_arguments(name: str, function: BuildModel, arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that a function does not take, or lacks, with those that it takes."""
    try:
        signature = inspect.signature(function)
        signature.bind(**arguments)
    except ValueError:  # of a function without one
        return
    except TypeError as error:
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        known = {key: each for key, each in signature.parameters.items() if each.kind not in variadic}
        unknown = [word for word in arguments if word not in known]
        missing = [key for key, each in known.items() if each.default is each.empty and key not in arguments]
        typed = " ".join(f"--model-arg {word}=…" for word in missing)
        given = spelled(typed, f"model_arguments={{{', '.join(f'{word!r}: …' for word in missing)}}}")
        raise UsageError(
            f"{name}({', '.join(map(str, known.values()))}) cannot be called with {_shown(arguments)}: {error}",
            fix=did_you_mean(unknown[0], known) if unknown and known else given if missing else "leave it out",
        ) from error


def _parameters(function: BuildModel) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "what its documentation says"


def _shown(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"


def _dataset(name: str) -> Any:
    value = import_named(name)
    if not callable(value) or (not isinstance(value, type) and hasattr(value, "__getitem__")):
        return value
    try:
        return value()
    except Exception as error:
        raise UsageError(
            f"{name} returns no dataset: {type(error).__name__}: {error}",
            fix="name a dataset, or a function or class that returns one without arguments",
        ) from error
