"""A model of the user's own on the command line: `package.module:function`, which builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True)
class UserModel:
    name: str
    build: Callable[[], nn.Module]
    code: str
    """sha256 of the file that the function is in."""


def is_own(model: str | None) -> bool:
    """Whether a word names a function, and neither a preset nor a folder."""
    module, colon, function = (model or "").partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def own_model(name: str) -> UserModel:
    """Imports the module, from the working folder too. Raises UsageError where there is no such function."""
    import hashlib
    import importlib
    import sys
    from pathlib import Path

    from thrifty.core.errors import UsageError, did_you_mean

    module_name, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # last: a torch.py next to the model is not torch
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's own code raises
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.split(".")[0])
        what = f"--model {name}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        mend = f'mend it: python -c "import {module_name}" says where'
        raise UsageError(what, fix="start where `import` finds it" if is_missing else mend) from error
    build = getattr(module, function, None)
    if not callable(build):
        near = [word for word, thing in vars(module).items() if callable(thing)]
        raise UsageError(f"{module_name} has no function {function!r}", fix=did_you_mean(function, near))
    file = getattr(module, "__file__", None)
    return UserModel(name, build, hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "")
