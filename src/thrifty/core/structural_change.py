"""A structural change in the middle of a run, by the same path as resuming.

Values are gathered by name, the plain model is rebuilt at the new structure, every technique is applied again, values
are loaded by name, and the change says where new parameters and their optimizer state start from. Nothing is patched
in a running model, so it works the same when the model is sharded or compiled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError

Moments = Literal["reset", "copy", "mean"]
"""What becomes of the optimizer's state: it starts afresh, its age too; or each parameter's comes from where its value
came from; or that, but the second moments of what was added are their mean over the layer that it was copied from."""


def same_name(parameter: str) -> str | None:
    return parameter


def same_value(parameter: str, value: Tensor) -> Tensor:
    return value


def same_shape(parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
    raise IntegrityError(f"{parameter} is to be of shape {tuple(shape)}, and its old value is of {tuple(value.shape)}")


@dataclass(frozen=True)
class StructuralChange:
    reason: str
    decision: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON, written to the log; enough to make `restructure` again on resume."""
    restructure: Callable[[nn.Module], nn.Module] = lambda model: model
    """The plain model to the plain model of the new structure. Applied to a freshly built model each time."""
    origin: Callable[[str], str | None] = same_name
    """For a parameter of the new structure, the old one whose value it starts from; None keeps its first value."""
    added: Callable[[str], bool] | None = None
    """Whether a parameter is one more copy of its origin, not the origin itself; unless given, whether it has another
    name."""
    average: str = ""
    """The slot of the optimizer, by the end of its name, that holds an average of the weights which added parameters
    start from in place of the weights; "" for the weights."""
    resize: Callable[[str, Tensor, torch.Size], Tensor] = same_shape
    """For a parameter of the new structure, the old whole value, and the shape it has to be of: what it is in that
    shape. Only asked where shapes differ, and of all that goes with a parameter: its value, its mask, its moments."""
    value: Callable[[str, Tensor], Tensor] = same_value
    """What is done to a whole value, resized already, before a parameter of the new structure starts from it. Asked for
    weights, their averages and differences between them, not for moments; linear, since differences have no other."""
    moments: Moments = "copy"

    def adds(self, parameter: str) -> bool:
        return self.added(parameter) if self.added else self.origin(parameter) != parameter
