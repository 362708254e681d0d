"""The accelerators. One file is one design, and this folder is the registry; rules of a paper stand here only.

A design says how a layer of attention becomes a stream of items through its stations. Masks and counts come with the
layer: a design never filters, so that every one can be given the very same sets.
"""

import importlib
import pkgutil

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.accelerator.design_stream import AcceleratorDesign


def design_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_design(name: str) -> AcceleratorDesign:
    """The design of this name; raises UsageError with the nearest name where there is none."""
    refuse_unknown("there is no design", name, design_names())
    return importlib.import_module(f"{__name__}.{name}").DESIGN
