"""Accelerator designs: simulate attention and sparse products as published hardware computes them.

Each file is one design, and only these files contain rules of a paper. A design defines how a layer of attention
becomes a stream of items through stations. The layer carries its masks and counts: a design never filters, so all
designs can run the same masks."""

import importlib
import pkgutil

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign


def design_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_design(name: str) -> AcceleratorDesign:
    """Return the design of this name. Raises UsageError with the nearest name if there is none."""
    refuse_unknown("there is no design", name, design_names())
    return importlib.import_module(f"{__name__}.{name}").DESIGN
