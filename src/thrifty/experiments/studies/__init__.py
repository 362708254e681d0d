"""Published shapes to reproduce, each a file with a function of its name that returns a Study; the docstring has the
command and what to expect. The folder is the registry.
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
    """Every study by name, sorted; nothing is imported for this."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Callable[..., Study]:
    """The function that makes the study of this name. Raises UsageError with the nearest name when there is none."""
    refuse_unknown("there is no study", name, names())
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)


def make(name: str, assignments: Sequence[str] = ()) -> Study:
    """The study of this name, with parameters of its function set by `key=value`."""
    function = find(name)
    hints, arguments = typing.get_type_hints(function), {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or key not in inspect.signature(function).parameters:
            known = inspect.signature(function).parameters
            raise UsageError(f"--set {assignment!r}: {name} has no setting {key!r}", fix=did_you_mean(key, known))
        arguments[key] = convert(hints[key], toml_value(text), key)
    return function(**arguments)
