"""Technique: an immutable object that changes a run.

The fields of a technique are its settings, and its methods apply the changes. Most methods take an object, such as the
model, and return an object of the same type. By default they return their argument unchanged. A technique never
accesses the trainer, the recipe or another technique.
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
    """Numerical promise of a technique, relative to the run without it. The contract test checks the promise."""

    EXACT = "exact"  # bitwise equal to the run without the technique
    ROUNDING = "rounding"  # equal to that run within `Technique.tolerance`
    DIFFERENT = "different"  # another algorithm, which must still learn


class FrozenValue:
    """A value whose attributes cannot be assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True)
class Technique(FrozenValue):
    """Base class of techniques: frozen dataclasses with keyword-only settings as annotated attributes."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    tolerance: ClassVar[float] = 0.0
    """Maximum relative difference of the loss in the contract test, for `Numerics.ROUNDING`."""
    micro_batches: ClassVar[int] = 1
    """Number of micro-batches per step on each rank. In techniques that claim `MICRO_BATCHES`, the number is a
    setting."""
    claims: ClassVar[frozenset[Claim]] = frozenset()
    """Decisions that no other technique of the run may make."""
    needs_names: ClassVar[bool] = False
    """True if the technique's update selects parameters by name."""
    clashes: ClassVar[Mapping[Claim, str]] = {}
    """Claims that exclude this technique if another technique makes them, each with the reason."""

    def __init_subclass__(cls) -> None:
        _, package, path = cls.__module__.rpartition("techniques.")
        cls.name = path if package else re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        for claim in (*cls.claims, *cls.clashes):
            if not isinstance(claim, Claim):
                raise UsageError(
                    f"{cls.name}: there is no claim {claim!r}", fix="choose a member of thrifty.core.claims.Claim"
                )
        if "__dataclass_params__" in vars(cls):  # the copy that @dataclass(slots=True) creates
            return
        made = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        dataclass(frozen=True, kw_only=True)(cls)
        # a subclass may have its own @dataclass, which requires the fields and refuses own __setattr__ or __delattr__
        del cls.__setattr__, cls.__delattr__
        for name, field in made.items():
            if field.default_factory is not MISSING:
                setattr(cls, name, field)

    def __post_init__(self) -> None:
        check_bounds(self, self.name)

    @property
    def optional_seams(self) -> frozenset[str]:
        """Names of methods that a user's own training loop need not call. Such a method only checks or reports, or
        `change_forward` or `hook_steps` replaces it."""
        return frozenset()

    @property
    def divides_ranks(self) -> bool:
        """True if the technique divides the work of a step among ranks."""
        return not self.claims.isdisjoint(PARALLELISM)

    @property
    def number_format(self) -> Literal["float32", "bfloat16", "float16"]:
        """Data type of matrix products: float32 unless the technique claims `Claim.PRECISION`."""
        return "bfloat16" if Claim.PRECISION in self.claims else "float32"

    @property
    def is_low_precision(self) -> bool:
        """True if the technique computes or stores values in fewer bits, so that rounding errors are large."""
        return self.numerics is Numerics.DIFFERENT and (self.stage is Stage.PRECISION or Claim.PRECISION in self.claims)

    @property
    def recomputation(self) -> Literal["none", "selective", "every"]:
        """Recomputed activations of a block: none, all except results of matrix products and attention, or all."""
        return "every" if Claim.RECOMPUTATION in self.claims else "none"

    @property
    def limits_activation_bytes(self) -> bool:
        """True if the technique promises an upper limit on activation memory."""
        return Claim.ACTIVATION_BYTES in self.claims

    @property
    def offloads_optimizer_state(self) -> bool:
        """True if the optimizer state is offloaded from the device between updates."""
        return False

    def idle_in(self, steps: int) -> str:
        """Return a sentence about a main effect that never occurs in a run of `steps` steps; "" if all occur."""
        return ""

    def overrides(self, *methods: str) -> bool:
        """Return True if the technique overrides any of `methods`."""
        return any(getattr(type(self), method) is not getattr(Technique, method) for method in methods)

    def model(self, model: nn.Module) -> nn.Module:
        """Return the changed model. Called before training and again after every structural change of the run."""
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        return source

    def objective(self, objective: Objective) -> Objective:
        return objective

    def backward(self, backward: Backward) -> Backward:
        return backward

    def update(self, transform: GradientTransform) -> GradientTransform:
        """Return `transform`, which applies the later stages, wrapped by the technique's own transform."""
        return transform

    def changes(self, step: int, state: "TrainState") -> "StructuralChange | None":
        """Return the structural change to make before `step`, or None; step 0 is the start of the run. The result must
        depend only on the settings, the step and the state's values. If the state's log already has this change, repeat
        the logged decision."""
        return None

    def footprint(self, footprint: Footprint) -> Footprint:
        """Return the footprint plus memory and work that a traced step cannot show. Override this method only for work
        of other ranks, or for amounts that depend on tensor values."""
        return footprint

    def change_forward(self, model: nn.Module) -> None:
        """Change the model's forward pass to do the work of `objective` and `backward` in a user's own training loop.
        Raise NeedsTrainer, before any change, if the settings require the trainer."""

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Register optimizer-step hooks that do the work of `backward` in a user's own training loop."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Undo the changes to `model` but keep the learned function, for export as the plain architecture."""
        return model

    def holds(self, state: "TrainState") -> None:
        """Raise IntegrityError if a promise of the technique is broken. Called at the start, after each structural
        change, after each update that changes masks, and at the end."""
