"""Studies of published claims, one file per study. A function with the file's name returns the Study.

The docstring of the function states the command and the expected outcome. Every file in this folder is registered as a
study.
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
    """Return the sorted names of all studies without importing the studies."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Callable[..., Study]:
    """Return the function that builds a study. Raises UsageError with the most similar name if there is no such
    study.
    """
    refuse_unknown("there is no study", name, names())
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def make(name: str, assignments: Sequence[str] = ()) -> Study:
    """Build a study by name. `key=value` assignments set arguments of the study's function."""
    function = find(name)
    hints, arguments = typing.get_type_hints(function), {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in inspect.signature(function).parameters:
            known = inspect.signature(function).parameters
            raise UsageError(f"--set {assignment!r}: {name!r} has no setting {key!r}", fix=did_you_mean(key, known))
        arguments[key] = convert(hints[key], toml_value(text), key)
    return function(**arguments)
