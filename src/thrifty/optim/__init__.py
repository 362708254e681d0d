"""Optimizers: transform elements, torch optimizer, fused and chunked updates, partition, weight masks.

The optimizers of techniques are attributes too, such as `thrifty.optim.AdamW`, made when they are first used.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    made = import_module("thrifty.interface.optimizers").optimizer_named(name)
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return import_module("thrifty.interface.optimizers").optimizer_names()
