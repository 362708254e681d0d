"""Generator of the stub of `thrifty.optim` and of the public interface snapshot: `python tools/public_stubs.py`.

A test compares both with its output, so a change of a public name or signature shows in a diff.
"""

import inspect
import json
import typing
from dataclasses import MISSING, fields
from pathlib import Path

import thrifty
from thrifty.core.setting_bounds import hints_of
from thrifty.core.technique import Technique
from thrifty.interface.optimizers import optimizer_named, optimizer_names

ROOT = Path(__file__).parents[1]
OPTIMIZERS = ROOT / "src" / "thrifty" / "optim" / "__init__.pyi"
SNAPSHOT = ROOT / "tests" / "interface" / "public_interface.txt"


def plain_type(hint: object) -> str:
    """Return a type without its bounds, as source text."""
    if typing.get_origin(hint) is typing.Annotated:
        return plain_type(typing.get_args(hint)[0])
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return f"Literal[{', '.join(map(_written, arguments))}]"
    if typing.get_origin(hint) is tuple:
        return f"tuple[{', '.join('...' if each is ... else plain_type(each) for each in arguments)}]"
    if arguments:  # a union
        return " | ".join(map(plain_type, arguments))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def settings_of(technique: type[Technique]) -> list[str]:
    """Return the settings of a technique as keyword arguments with their defaults."""
    hints = hints_of(technique)
    typed = {field.name: plain_type(hints[field.name]) for field in fields(technique)}
    defaults = {field.name: field.default for field in fields(technique) if field.default is not MISSING}
    values = {name: f" = {_written(default)}" for name, default in defaults.items()}
    return [f"{name}: {kind}{values.get(name, '')}" for name, kind in typed.items()]


def optimizer_stub() -> str:
    """Return the stub of `thrifty.optim`."""
    lines = [
        '"""Torch optimizers of the techniques that decide the optimizer; written by tools/public_stubs.py."""',
        "",
        "from math import inf",
        "from typing import Literal",
        "",
        "from thrifty.composition.technique_optimizer import Params, TechniqueOptimizer",
    ]
    for name in optimizer_names():
        arguments = ["self", "params: Params", "*", *settings_of(optimizer_named(name).technique)]
        lines += ["", f"class {name}(TechniqueOptimizer):", "    def __init__("]
        lines += [f"        {each}," for each in [*arguments, "total_steps: int | None = None"]]
        lines += ["    ) -> None: ..."]
    return "\n".join(lines) + "\n"


def snapshot() -> str:
    """Return each public name with its signature, one per line."""
    lines = []
    for name in dir(thrifty):
        value = getattr(thrifty, name)
        if inspect.isclass(value) and issubclass(value, Technique) and value is not Technique:
            lines.append(f"{name}({', '.join(settings_of(value))})")
        elif inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        elif inspect.ismodule(value):
            listed = dir(value) if name == "optim" else [key for key in vars(value) if not key.startswith("_")]
            own = [key for key in listed if name == "optim" or inspect.isfunction(getattr(value, key))]
            own = [key for key in own if name == "optim" or getattr(value, key).__module__ == value.__name__]
            lines += [f"{name}.{key}{'' if name == 'optim' else inspect.signature(getattr(value, key))}" for key in own]
        else:
            lines.append(name)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OPTIMIZERS.write_text(optimizer_stub(), encoding="utf-8")
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
