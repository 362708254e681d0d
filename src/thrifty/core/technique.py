"""Technique: a small value that changes a run.

Its fields are its settings, its methods are the changes. Most methods take and return an object of the same type, and
are the identity until overridden. A technique never accesses the trainer, the recipe or another technique.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform

from torch import nn
from torch.optim import Optimizer

from thrifty.core.backward import Backward
from thrifty.core.batches import BatchSource
from thrifty.core.claims import PARALLELISM, Claim
from thrifty.core.errors import UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.objective import Objective
from thrifty.core.setting_bounds import check_bounds
from thrifty.core.stages import Stage

if TYPE_CHECKING:
    from thrifty.core.state import TrainState
    from thrifty.core.structural_change import StructuralChange


class Numerics(Enum):
    """Promise of a technique about numerical results; the contract test checks it."""

    EXACT = "exact"  # bitwise equal to the plain run
    ROUNDING = "rounding"  # equal to the plain run within `Technique.tolerance`
    DIFFERENT = "different"  # another algorithm: it must learn


class FrozenValue:
    """A value whose attributes cannot be assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True)
class Technique(FrozenValue):
    """Base of techniques. Subclasses are frozen dataclasses whose annotated attributes are keyword-only settings."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    tolerance: ClassVar[float] = 0.0
    """Largest relative difference of the loss over the contract test's steps, for `Numerics.ROUNDING`."""
    micro_batches: ClassVar[int] = 1
    """Number of passes into which the examples of a rank are divided; a setting if it claims `MICRO_BATCHES`."""
    claims: ClassVar[frozenset[Claim]] = frozenset()
    """Decisions that only this technique of a run may make."""
    needs_names: ClassVar[bool] = False
    """True if its update selects parameters by name."""
    clashes: ClassVar[Mapping[Claim, str]] = {}
    """Claims of other techniques that it cannot be combined with, each with the reason."""

    def __init_subclass__(cls) -> None:
        _, package, path = cls.__module__.rpartition("techniques.")
        cls.name = path if package else re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        for claim in (*cls.claims, *cls.clashes):
            if not isinstance(claim, Claim):
                raise UsageError(
                    f"{cls.name}: there is no claim {claim!r}", fix="choose a member of thrifty.core.claims.Claim"
                )
        if "__dataclass_params__" in vars(cls):  # the copy with slots of a class that was decorated
            return
        made = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True, kw_only=True)(cls)
        # a class may be decorated as a dataclass too, which requires these fields, and no methods but FrozenValue's
        del cls.__setattr__, cls.__delattr__
        for name, field in made.items():
            if field.default_factory is not MISSING:
                setattr(cls, name, field)

    def __post_init__(self) -> None:
        check_bounds(self, self.name)

    @property
    def optional_seams(self) -> frozenset[str]:
        """Methods that a user's own loop may leave out. They only check or report, or `change_forward` and `hook_steps`
        replace them there."""
        return frozenset()

    @property
    def divides_ranks(self) -> bool:
        """True if it divides the work of a step among ranks."""
        return not self.claims.isdisjoint(PARALLELISM)

    @property
    def number_format(self) -> Literal["float32", "bfloat16", "float16"]:
        """Data type of matrix products if it claims `Claim.PRECISION`, else float32."""
        return "bfloat16" if Claim.PRECISION in self.claims else "float32"

    @property
    def is_low_precision(self) -> bool:
        """True if it computes or stores values in fewer bits, so that the last bit is large."""
        return self.numerics is Numerics.DIFFERENT and (self.stage is Stage.PRECISION or Claim.PRECISION in self.claims)

    @property
    def recomputation(self) -> Literal["none", "selective", "every"]:
        """Recomputed activations of a block: none, all except matrix products and attention, or all."""
        return "every" if Claim.RECOMPUTATION in self.claims else "none"

    @property
    def limits_activation_bytes(self) -> bool:
        """True if it promises an upper limit on the memory of activations."""
        return Claim.ACTIVATION_BYTES in self.claims

    @property
    def offloads_optimizer_state(self) -> bool:
        """True if the optimizer state is offloaded from the device between updates."""
        return False

    def idle_in(self, steps: int) -> str:
        """Return a sentence on a main effect that never occurs in a run of so many steps; "" if all occur."""
        return ""

    def overrides(self, *methods: str) -> bool:
        """Return True if it overrides any of these methods."""
        return any(getattr(type(self), method) is not getattr(Technique, method) for method in methods)

    def model(self, model: nn.Module) -> nn.Module:
        """Return the changed model. Called before training and again after every structural change."""
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        return source

    def objective(self, objective: Objective) -> Objective:
        return objective

    def backward(self, backward: Backward) -> Backward:
        return backward

    def update(self, transform: GradientTransform) -> GradientTransform:
        """Return the wrapped transform; `transform` applies the later stages to gradients."""
        return transform

    def changes(self, step: int, state: "TrainState") -> "StructuralChange | None":
        """Return the structural change before this step, or None; step 0 is before the first. The result must be a
        function of the settings, the step and the state's values. A decision that is already in the state's log must be
        repeated from the log."""
        return None

    def footprint(self, footprint: Footprint) -> Footprint:
        """Return the footprint with additions that a traced step cannot show. A technique's memory and work are counted
        on a traced step. Override this only for work of other ranks, or for amounts that depend on values."""
        return footprint

    def change_forward(self, model: nn.Module) -> None:
        """Change the model's forward pass to do the work of `objective` and `backward` in a user's own loop. Raises
        NeedsTrainer, before any change, for settings that require the trainer."""

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register optimizer-step hooks that do the work of `backward` in a user's own loop."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Remove the changes of `model` but keep the function, for export as the plain architecture."""
        return model

    def holds(self, state: "TrainState") -> None:
        """Raise IntegrityError if a promise is broken. Called at the start, after each structural change, after each
        update that moves masks, and at the end."""
