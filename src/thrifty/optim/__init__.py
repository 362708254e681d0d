"""Optimizers: transform elements, torch optimizer, fused and chunked updates, partition, weight masks.

Optimizer classes of techniques are also attributes, such as `thrifty.optim.AdamW`. Each class is built at its first
use.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    optimizer = import_module("thrifty.interface.optimizers").optimizer_named(name)
    globals()[name] = optimizer
    return optimizer


def __dir__() -> list[str]:
    return import_module("thrifty.interface.optimizers").optimizer_names()
