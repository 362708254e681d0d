"""Optimizers: transform elements, torch optimizer, fused and chunked updates, partition, weight masks.

The optimizers of techniques are attributes too, such as `thrifty.optim.AdamW`. Each is built on its first use.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    optimizer = import_module("thrifty.interface.optimizers").optimizer_named(name)
    globals()[name] = optimizer
    return optimizer


def __dir__() -> list[str]:
    return import_module("thrifty.interface.optimizers").optimizer_names()
