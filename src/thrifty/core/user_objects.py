"""Models, data, losses and metrics passed from Python, and their records in a run folder."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from thrifty.core.errors import ThriftyError, UsageError, did_you_mean, spelled
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.user_sources import description, import_function, import_named, reference, source_fingerprints

BuildModel = Callable[..., nn.Module]


@dataclass(frozen=True)
class PythonObjects:
    """Names of objects passed from Python, and fingerprints of their source. A resumed run compares the fingerprints to
    detect changes. The names are never imported."""

    data: str = ""
    held_out: str = ""
    loss: str = ""
    collate: str = ""
    metrics: tuple[str, ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Truncated source hash of each of the user's functions and classes that the objects use, by name."""
    metric_sources: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Such hashes of functions that only metrics use. A resumed run may change them."""


@dataclass(frozen=True)
class UserObjects:
    """Model, data, loss and metrics from Python that replace sections of a recipe; see `thrifty.recipe`."""

    model: nn.Module | BuildModel | None = None
    """A function that builds the model, or a module whose weights are the initial values."""
    data: Any = None
    held_out: Any = None
    loss: Callable[[nn.Module, Any], Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Import names of the objects that were passed by name."""

    @classmethod
    def from_arguments(cls, **objects: Any) -> "UserObjects":
        """Return the objects, and import objects that were passed by name. A name for data refers to a data set, or to
        a function or class that returns a data set when called without arguments.
        """
        names = {name: value for name, value in objects.items() if isinstance(value, str)}
        imported: dict[str, Any] = {}
        for name, text in names.items():
            is_data = name in ("data", "held_out")
            imported[name] = _dataset(text) if is_data else import_function(text)
        return cls(**{**objects, **imported}, names=names)

    def of_model(self) -> "UserObjects":
        """Return a copy with the model only."""
        return UserObjects(self.model, names={name: text for name, text in self.names.items() if name == "model"})

    @property
    def is_passed(self) -> bool:
        """True if any object was passed."""
        return bool(self.build) or self.described != PythonObjects()

    @property
    def build(self) -> str:
        """Name of the model's function or class; empty without a model."""
        return self.names.get("model") or ("" if self.model is None else reference(self.model))

    @cached_property
    def described(self) -> PythonObjects:
        """Names and fingerprints of the objects, for the record in a run folder."""
        singles = {name: getattr(self, name) for name in ("data", "held_out", "loss", "collate")}
        passed = {name: value for name, value in singles.items() if value is not None}
        names = {name: self.names.get(name) or reference(value) for name, value in passed.items()}
        metrics = tuple(f"{name} {description(function)}" for name, function in sorted(self.metrics.items()))
        makers = [import_named(name) for name in self.names.values()]
        values = [*makers, *passed.values(), *([] if self.model is None else [self.model])]
        sources = source_fingerprints(values)
        measuring = source_fingerprints(self.metrics.values())
        others = {name: value for name, value in measuring.items() if name not in sources}
        return PythonObjects(**names, metrics=metrics, sources=sources, metric_sources=others)

    def build_model(self, arguments: Mapping[str, Any] | None = None) -> nn.Module:
        """Return the model that the user's function builds, or a copy of the user's module. Raise UsageError if the
        function fails, or returns no module, a module with lazy layers or a module of TorchScript."""
        model = self._copied(self.model) if isinstance(self.model, nn.Module) else self._called(arguments)
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError(
                f"{self.build} is a module of TorchScript, whose parts cannot be changed",
                fix="pass the module that was traced or scripted",
            )
        if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
            raise UsageError(
                f"{self.build} has lazy layers without weights, such as {lazy[0]!r}",
                fix="run a batch through the model where it is built: model(inputs)",
            )
        return model

    def _copied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a module. Tensors that a forward pass left in its attributes are copied without their
        graph."""
        own = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
        left = {id(value): value.detach().clone() for value in own if value.grad_fn is not None}
        try:
            return copy.deepcopy(model, left)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UsageError(
                f"{self.build} cannot be copied: {type(error).__name__}: {error}",
                fix="pass the function that builds it: model=build_model",
            ) from error

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
                fix=f"correct {self.build}; or pass arguments that it takes: {_parameters(self.model)}",
            ) from error
        if not isinstance(model, nn.Module):
            what = f"{self.build} returns a {type(model).__name__}, not a torch.nn.Module"
            raise UsageError(what, fix="return the model itself")
        return model


def _refuse_arguments(name: str, function: BuildModel, arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for unknown or missing arguments of a function. The message has the known arguments."""
    if not callable(function):
        what = f"the model is a '{type(function).__name__}', not a torch.nn.Module or a function that builds one"
        raise UsageError(what, fix="model=build_model; for weights, load them in it: model.load_state_dict(weights)")
    try:
        signature = inspect.signature(function)
        signature.bind(**arguments)
    except ValueError:  # a function without a signature
        return
    except TypeError as error:
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        known = {key: each for key, each in signature.parameters.items() if each.kind not in variadic}
        unknown = [word for word in arguments if word not in known]
        missing = [key for key, each in known.items() if each.default is each.empty and key not in arguments]
        typed = " ".join(f"--model-arg {word}=…" for word in missing)
        added = spelled(typed, f"model_arguments={{{', '.join(f'{word!r}: …' for word in missing)}}}")
        raise UsageError(
            f"{name}({', '.join(map(str, known.values()))}) cannot be called with {_shown(arguments)}: {error}",
            fix=did_you_mean(unknown[0], known)
            if unknown and known
            else added
            if missing
            else "leave the arguments out",
        ) from error


def _parameters(function: BuildModel) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:
        return "the arguments in its documentation"


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
            fix="pass the name of a dataset; or of a function or class that returns a dataset without arguments",
        ) from error
