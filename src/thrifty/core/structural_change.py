"""Change of the model's structure during a run, by the same steps as resuming.

Values are gathered by name, the plain model is rebuilt with the new structure, and every technique is applied again.
Values are then loaded by name. The change defines the initial values and optimizer state of new parameters. No running
model is patched, so the change also works on sharded or compiled models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError

Moments = Literal["reset", "copy", "mean"]
"""Optimizer state after the change. "reset" initializes the state and its age again. "copy" copies each parameter's
state from the parameter whose value it takes. "mean" does the same, except for second moments of added parameters.
These moments are the mean over the layer that the parameters were copied from."""


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
    """Plain JSON for the log, from which a resumed run can repeat `restructure`."""
    restructure: Callable[[nn.Module], nn.Module] = lambda model: model
    """Function from the plain model to the plain model with the new structure. Its argument is a newly built model."""
    origin: Callable[[str], str | None] = same_name
    """Function from a new parameter's name to the old parameter whose value it takes; None keeps the initial value."""
    added: Callable[[str], bool] | None = None
    """Function that returns True if a parameter is an added copy of its origin. By default, a parameter is added if its
    name differs from the origin's name."""
    average: str = ""
    """Suffix of the optimizer slot with averaged weights, from which added parameters start. With "", added parameters
    start from the weights."""
    resize: Callable[[str, Tensor, torch.Size], Tensor] = same_shape
    """Function from a parameter's name, whole old value and new shape to a value of the new shape. It is called only if
    the shapes differ. It also resizes the parameter's mask and moments."""
    value: Callable[[str, Tensor], Tensor] = same_value
    """Function applied to the whole, resized value of a new parameter. It receives weights, averages of weights and
    differences between weights, but not moments. It must be linear, because differences are transformed too."""
    moments: Moments = "copy"

    def adds(self, parameter: str) -> bool:
        """Return True if the parameter is an added copy of its origin."""
        return self.added(parameter) if self.added else self.origin(parameter) != parameter
