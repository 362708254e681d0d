"""Studies of published claims, one file each, with a function of the file's name that returns a Study.

The function's docstring states the command and the expected outcome. The folder is the registry.
"""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Sequence

from thrifty.core.errors import UsageError, did_you_mean, refuse_unknown
from thrifty.core.plain_values import convert
from thrifty.experiments.study import Study
from thrifty.recipes.recipe_layers import toml_value


def names() -> list[str]:
    """Return the names of all studies, sorted, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Callable[..., Study]:
    """Return the function that builds the study of this name. Raise UsageError with the nearest name if there is
    none."""
    refuse_unknown("there is no study", name, names())
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def make(name: str, assignments: Sequence[str] = ()) -> Study:
    """Build the study of this name, with arguments of its function set by `key=value`."""
    function = find(name)
    hints, arguments = typing.get_type_hints(function), {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in inspect.signature(function).parameters:
            known = inspect.signature(function).parameters
            raise UsageError(f"--set {assignment!r}: {name!r} has no setting {key!r}", fix=did_you_mean(key, known))
        arguments[key] = convert(hints[key], toml_value(text), key)
    return function(**arguments)
