"""Thrifty trains Transformers with less compute, memory and data, and proves it.

Nothing is imported here before a public name is used: `python -m thrifty` first takes the working folder off the path.
"""

__version__ = "0.1.0"

_names: dict[str, tuple[str, str]] = {}


def _public() -> dict[str, tuple[str, str]]:
    """Return, for each public name in `__init__.pyi`, its module and its name in that module."""
    if not _names:
        import ast
        from pathlib import Path

        tree = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        _names.update(
            (alias.asname or alias.name, (node.module or "", alias.name)) for node in imports for alias in node.names
        )
    return _names


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name.startswith("_") or name not in _public():
        hint = ""
        if not name.startswith("_"):
            from thrifty.core.errors import did_you_mean

            hint = f"; {did_you_mean(name, _public(), 'dir(thrifty) lists the names')}"
        raise AttributeError(f"module 'thrifty' has no attribute {name!r}{hint}")
    from importlib import import_module

    module, own = _public()[name]
    package = import_module(f"{__name__}.{module}" if module else __name__)
    value = vars(package).get(own) or import_module(f"{package.__name__}.{own}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_public()])
