"""Reference of the public Python names."""

import inspect
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import thrifty
from generator.card_pages import attribute_texts
from generator.markdown import block, code, docstring, join, md, table, technique_link
from thrifty.core.technique import Technique


def python_names() -> str:
    """Return the reference of the public Python names."""
    values = {name: getattr(thrifty, name) for name in dir(thrifty) if not name.startswith("_")}
    modules = {name: value for name, value in values.items() if inspect.ismodule(value)}
    kinds = {name: value for name, value in values.items() if inspect.isclass(value)}
    own = {name: kind for name, kind in kinds.items() if issubclass(kind, Technique) and kind is not Technique}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    parts = [
        "# Python",
        "`import thrifty as th` imports nothing else; each name is imported when it is first used. Each command is a "
        "function with the same arguments. Its result prints as the command does, has `as_dict()` with plain data, and "
        "is HTML in a notebook.",
        "## Functions",
        *(_python(f"thrifty.{name}", value) for name, value in functions.items()),
    ]
    for name, module in modules.items():
        listed = dir(module) if name == "optim" else _functions_of(module)
        about = inspect.cleandoc(module.__doc__ or "").partition("\n")[0]
        parts += [f"## thrifty.{name}", md(about)]
        if name == "optim":
            made = (
                (code(f"thrifty.optim.{one}"), technique_link(getattr(module, one).technique.name)) for one in listed
            )
            parts.append(table(("optimizer", "technique"), made))
        else:
            parts += [_python(f"thrifty.{name}.{one}", getattr(module, one)) for one in listed]
    others = {name: kind for name, kind in kinds.items() if name not in own}
    parts += ["## Classes", *(_python(f"thrifty.{name}", kind) for name, kind in others.items())]
    named = ((code(f"thrifty.{name}"), technique_link(kind.name)) for name, kind in own.items())
    return join(*parts, "## Techniques", table(("class", "technique"), named))


def _functions_of(module: ModuleType) -> list[str]:
    """Return the public functions that a module defines."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in own.items() if inspect.isfunction(value) and value.__module__ == module.__name__]


def _python(name: str, value: Any) -> str:
    short = name.removeprefix("thrifty.")
    if not inspect.isclass(value):
        return join(f"### {md(short)}", block("python", signature(name, value)), docstring(value.__doc__))
    public = [
        (code(key), " ".join((inspect.getdoc(member) or "").partition("\n\n")[0].split()))
        for key, member in inspect.getmembers(value)
        if not key.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
        and not key.startswith("as_") and (member.__doc__ or "").strip()
    ]  # fmt: skip
    texts = attribute_texts(value) if is_dataclass(value) else {}
    attributes = (
        [(code(field.name), texts[field.name]) for field in fields(value) if field.name in texts] if texts else []
    )
    shown = table(("attribute or method", "content"), [*attributes, *public]) if attributes or public else ""
    return join(f"### {md(short)}", docstring(vars(value).get("__doc__")), shown)


def signature(name: str, function: Any) -> str:
    """Return the signature without types: names and defaults, one argument per line if it is long."""
    parts, starred = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts, starred = [*parts, "*"], True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred |= prefix == "*"
        default = parameter.default
        given = "" if default is parameter.empty else f"={str(default) if isinstance(default, Path) else default!r}"
        parts.append(f"{prefix}{parameter.name}{given}")
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= 88 else "\n".join([f"{name}(", *(f"    {part}," for part in parts), ")"])
