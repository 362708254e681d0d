"""Import names, source hashes and imports of the user's functions and classes."""

import hashlib
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.secret_redaction import redact_text

LONGEST = 200
"""Maximum number of characters that a recipe records of a partial function's arguments."""
HUB = "hub:"
"""Prefix of the name of a Hugging Face data set."""
MOST = 500
"""Maximum number of functions and classes whose source is hashed."""


def reference(value: Any) -> str:
    """Return the name of a function, or of an object's class, as package.module:name. For a started script, the module
    is the name by which the script can be imported."""
    named = _named(value)
    module = named.__module__
    if module in ("__main__", "__mp_main__"):
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else Path(file).stem if file else module
    return f"{module}:{named.__qualname__}"


def is_function_name(text: str | None) -> bool:
    """Return True if a text has the form package.module:function, False for a preset or a folder."""
    module, colon, name = (text or "").partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *name.split(".")))


def is_dataset_name(text: str | None) -> bool:
    """Return True if a text has the form package.module:name and is not a data set of the Hugging Face hub."""
    return is_function_name(text) and not str(text).startswith(HUB)


def import_function(name: str) -> Callable[..., Any]:
    """Import a function by its name; see `import_named`."""
    value = import_named(name)
    if not callable(value):
        raise UsageError(f"{name} is a {type(value).__name__}, not a function", fix="name a function or class")
    return value


def import_named(name: str) -> Any:
    """Import the object of this name. The working folder comes last on the import path. Raise UsageError if the name is
    not of the form package.module:name, or if the import fails."""
    if not is_function_name(name):
        raise UsageError(f"{name!r} is not an import name", fix="write it as package.module:name")
    module_name, _, path = name.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # last, so that a torch.py next to the model does not shadow torch
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:  # the user's code may raise anything
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (module_name, module_name.split(".")[0])
        what = f"{name}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        mend = f'correct the error that this command prints: python -c "import {module_name}"'
        start = f"correct the name; or start in the folder that contains {module_name.split('.')[0]!r}"
        raise UsageError(what, fix=start if is_missing else mend) from error
    for part in path.split("."):
        near = [word for word in vars(value) if not word.startswith("_")] if hasattr(value, "__dict__") else []
        value = getattr(value, part, None)
        if value is None:
            raise UsageError(f"{module_name} has no {path!r}", fix=did_you_mean(part, near))
    return value


def source_fingerprints(values: Iterable[Any]) -> dict[str, int]:
    """Return a truncated source hash of each of the user's functions and classes in `values`, by name. Functions and
    classes that `values` use are included. Installed packages are left out."""
    values = list(values)
    waiting, fingerprints, seen = [part for value in values for part in _parts(value)], dict[str, int](), set[str]()
    while waiting and len(seen) < MOST:
        named = _named(waiting.pop())
        name = reference(named)
        if name in seen or not _is_own(named):
            continue
        seen.add(name)
        waiting += _used(named)
        if name.rpartition(".")[0] in fingerprints:  # its class's source contains it
            continue
        try:
            text = inspect.getsource(named)
        except (OSError, TypeError):  # typed at a prompt, or compiled
            code = getattr(named, "__code__", None)
            text = repr((code.co_code, code.co_consts)) if code else name
        fingerprints[name] = _hash(text)
    for each in [part for value in values for part in _partials(value)]:
        text = f"{reference(each)}({_arguments(each)})"
        fingerprints[redact_text(text)[:LONGEST]] = _hash(text)
    return dict(sorted(fingerprints.items()))


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def _partials(value: Any) -> Iterator[partial[Any]]:
    """Yield the partial functions among a value and its attributes, such as the transforms of a dataset."""
    inner = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type | FunctionType) else ()
    for each in (value, *inner):
        if isinstance(each, partial):
            yield each


def _arguments(value: partial[Any]) -> str:
    """Return the arguments of a partial function as text, by type if an argument's text differs between processes."""
    words = [_stable(each) for each in value.args]
    return ", ".join([*words, *(f"{name}={_stable(each)}" for name, each in value.keywords.items())])


def _stable(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_stable, value))})"
    if value is None or isinstance(value, bool | int | float | str | Path):
        return repr(str(value)) if isinstance(value, Path) else repr(value)
    return f"{reference(value)}, whose value is not followed"


def _named(value: Any) -> Any:
    function = getattr(value, "func", value)  # the function of a partial
    return function if hasattr(function, "__qualname__") and hasattr(function, "__module__") else type(function)


def description(value: Any) -> str:
    """Return the name of a value. For a value that combines functions, as some metrics do, add the functions' names."""
    functions = _functions(value)
    return f"{reference(value)} of {' and '.join(map(reference, functions))}" if functions else reference(value)


def _functions(value: Any) -> list[Any]:
    if isinstance(value, type) or not is_dataclass(value):
        return []
    parts = [part for each in fields(value) if (part := getattr(value, each.name)) is not None]
    return parts if all(map(callable, parts)) else []


def _parts(value: Any) -> list[Any]:
    if isinstance(value, nn.Module):
        return [type(module) for module in value.modules()]
    return [value, *_functions(value)]


def _used(named: Any) -> Iterator[Any]:
    """Yield the functions and classes that a function or a class refers to."""
    if isinstance(named, type):
        yield from named.__bases__
        inner = [getattr(each, "__func__", getattr(each, "fget", each)) for each in vars(named).values()]
        yield from (each for each in inner if isinstance(each, FunctionType | type))
        return
    code, names = getattr(named, "__code__", None), getattr(named, "__globals__", {})
    if not isinstance(code, CodeType):
        return
    used = _names_in(code)
    values = [names[word] for word in used if word in names]
    values += [cell.cell_contents for cell in named.__closure__ or () if cell != type(cell)()]
    for value in values:
        if isinstance(value, ModuleType):
            values += [vars(value)[word] for word in used if word in vars(value)] if _is_own_file(value) else []
        elif callable(value):
            yield from _parts(value)


def _names_in(code: CodeType) -> list[str]:
    inner = [word for constant in code.co_consts if isinstance(constant, CodeType) for word in _names_in(constant)]
    return [*code.co_names, *inner]


def _is_own(named: Any) -> bool:
    module = sys.modules.get(getattr(named, "__module__", None) or "")
    return module is not None and _is_own_file(module)


def _is_own_file(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return module.__name__ == "__main__"
    return not any(Path(file).resolve().is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> list[Path]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [Path(place).resolve() for place in (*places, Path(__file__).parents[1], Path(nn.__file__).parents[2])]
