"""Thrifty trains Transformers with less compute, memory and data, and proves it."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


@cache
def _public() -> dict[str, tuple[str, str]]:
    """Return each public name with its module and its name there, as `__init__.pyi` states them for type checkers."""
    import ast

    tree = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name.startswith("__") or name not in _public():
        from thrifty.core.errors import did_you_mean

        hint = "" if name.startswith("_") else f"; {did_you_mean(name, _public(), 'dir(thrifty) lists the names')}"
        raise AttributeError(f"module 'thrifty' has no attribute {name!r}{hint}")
    module, own = _public()[name]
    package = import_module(f"{__name__}.{module}" if module else __name__)
    value = vars(package).get(own) or import_module(f"{package.__name__}.{own}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_public()])
