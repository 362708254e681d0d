"""Accelerator designs: simulate attention and sparse products as published hardware computes them.

Each file is one design, and only these files implement mechanisms from papers. A design converts a layer of attention
into work items and their cycles at each station (pipeline stage). Masks come from the layer, not from the design.
Therefore all designs can run the same masks."""

import importlib
import pkgutil

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign


def design_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_design(name: str) -> AcceleratorDesign:
    """Return the design called `name`. Raises UsageError with the nearest name if no design has the name."""
    refuse_unknown("there is no design", name, design_names())
    return importlib.import_module(f"{__name__}.{name}").DESIGN
