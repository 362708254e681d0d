"""A structural change in the middle of a run, by the same path as resuming.

Values are gathered by name, the plain model is rebuilt at the new structure, every technique is applied again, values
are loaded by name, and the change says where new parameters and their optimizer state start from. Nothing is patched
in a running model, so it works the same when the model is sharded or compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn


def same_name(parameter: str) -> str | None:
    return parameter


@dataclass(frozen=True)
class Change:
    reason: str
    decision: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON, written to the log; enough to make `restructure` again on resume."""
    restructure: Callable[[nn.Module], nn.Module] = lambda model: model
    """The plain model to the plain model of the new structure. Applied to a freshly built model each time."""
    origin: Callable[[str], str | None] = same_name
    """For a parameter of the new structure, the old one whose value it starts from; None keeps its first value."""
    moments: Literal["reset", "copy"] = "copy"
    """Whether the optimizer starts afresh (its age too) or takes each parameter's state from where its value came."""
