"""Change of the model's structure during a run, by the same path as resuming.

Values are gathered by name, the plain model is rebuilt with the new structure, and every technique is applied again.
Values are then loaded by name, and the change names the initial value of each new parameter. No running model is
patched, so the change also works on sharded or compiled models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError

Moments = Literal["reset", "copy", "mean"]
"""Optimizer state after the change. "reset" starts it afresh, its age too. "copy" takes each parameter's state from the
origin of its value. "mean" does the same, but second moments of added parameters are the mean over the layer that they
were copied from."""


def same_name(parameter: str) -> str | None:
    return parameter


def same_value(parameter: str, value: Tensor) -> Tensor:
    return value


def same_shape(parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
    raise IntegrityError(f"{parameter} must have shape {tuple(shape)}, but its old value has {tuple(value.shape)}")


@dataclass(frozen=True)
class StructuralChange:
    reason: str
    decision: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON for the log, sufficient to repeat `restructure` on resume."""
    restructure: Callable[[nn.Module], nn.Module] = lambda model: model
    """Function from the plain model to the plain model of the new structure. It always receives a fresh model."""
    origin: Callable[[str], str | None] = same_name
    """Function from a new parameter's name to the old parameter whose value it takes; None keeps its initialization."""
    added: Callable[[str], bool] | None = None
    """Function that returns True if a parameter is an added copy of its origin. By default: if its name differs."""
    average: str = ""
    """Suffix of the optimizer slot that holds averaged weights. Added parameters start from these; "" for weights."""
    resize: Callable[[str, Tensor, torch.Size], Tensor] = same_shape
    """Function from a parameter's name, its whole old value and the new shape to the value in that shape. It is called
    only if the shapes differ. It also resizes the parameter's mask and moments."""
    value: Callable[[str, Tensor], Tensor] = same_value
    """Function applied to a whole, resized value before a new parameter starts from it. It receives weights, their
    averages and differences between them, not moments. It must be linear, because differences are transformed too."""
    moments: Moments = "copy"

    def adds(self, parameter: str) -> bool:
        """Return True if the parameter is an added copy of its origin."""
        return self.added(parameter) if self.added else self.origin(parameter) != parameter
