"""A technique: a small value that can be switched on for any run.

Its fields are its settings, its methods are what it changes. Every method takes a thing and gives back a thing of the
same type, and is the identity until overridden. A technique never sees the trainer, the recipe or another technique.
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
    """What a technique promises about values; the contract test branches on it."""

    EXACT = "exact"  # bitwise the plain run
    ROUNDING = "rounding"  # the plain run within `Technique.tolerance`
    DIFFERENT = "different"  # another algorithm: it must learn


class FrozenValue:
    """A value whose attributes are never assigned."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True)
class Technique(FrozenValue):
    """A technique: its subclasses are frozen dataclasses, whose annotated attributes are keyword-only settings."""

    name: ClassVar[str]
    stage: ClassVar[Stage]
    numerics: ClassVar[Numerics]
    tolerance: ClassVar[float] = 0.0
    """With `Numerics.ROUNDING`: the largest relative difference of the loss over the contract test's steps."""
    micro_batches: ClassVar[int] = 1
    """The number of passes into which it divides the examples of a rank: a setting where it claims `MICRO_BATCHES`."""
    claims: ClassVar[frozenset[Claim]] = frozenset()
    """What only this technique of a run may decide."""
    needs_names: ClassVar[bool] = False
    """True if its update chooses parameters by their names."""
    clashes: ClassVar[Mapping[Claim, str]] = {}
    """Claims of other techniques that this one cannot be combined with, each with the reason."""

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
        # a class may be decorated as a dataclass as well, which needs these fields, and no methods but FrozenValue's
        del cls.__setattr__, cls.__delattr__
        for name, field in made.items():
            if field.default_factory is not MISSING:
                setattr(cls, name, field)

    def __post_init__(self) -> None:
        check_bounds(self, self.name)

    @property
    def optional_seams(self) -> frozenset[str]:
        """Methods that a loop of the user's own may leave out, because they only check or report, or because
        `change_forward` and `hook_steps` do their work there."""
        return frozenset()

    @property
    def divides_ranks(self) -> bool:
        """True if it divides the work of a step among ranks."""
        return not self.claims.isdisjoint(PARALLELISM)

    @property
    def number_format(self) -> Literal["float32", "bfloat16", "float16"]:
        """The format of matrix products if it decides that (`Claim.PRECISION`), else float32."""
        return "bfloat16" if Claim.PRECISION in self.claims else "float32"

    @property
    def is_low_precision(self) -> bool:
        """True if it computes or keeps values in fewer bits, where the last bit is a large one."""
        return self.numerics is Numerics.DIFFERENT and (self.stage is Stage.PRECISION or Claim.PRECISION in self.claims)

    @property
    def recomputation(self) -> Literal["none", "selective", "every"]:
        """What the backward pass recomputes of a block: nothing, all but matrix products and attention, or all."""
        return "every" if Claim.RECOMPUTATION in self.claims else "none"

    @property
    def limits_activation_bytes(self) -> bool:
        """True if it promises an upper limit on the memory of activations."""
        return Claim.ACTIVATION_BYTES in self.claims

    @property
    def offloads_optimizer_state(self) -> bool:
        """True if the optimizer state is outside the device's memory between updates."""
        return False

    def idle_in(self, steps: int) -> str:
        """Return what never happens in a run of so many steps although the technique is made for it; "" for nothing."""
        return ""

    def overrides(self, *methods: str) -> bool:
        """Return whether it changes any of these methods."""
        return any(getattr(type(self), method) is not getattr(Technique, method) for method in methods)

    def model(self, model: nn.Module) -> nn.Module:
        """Before training, and again after every structural change."""
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        return source

    def objective(self, objective: Objective) -> Objective:
        return objective

    def backward(self, backward: Backward) -> Backward:
        return backward

    def update(self, transform: GradientTransform) -> GradientTransform:
        """`transform` is what the later stages do with gradients."""
        return transform

    def changes(self, step: int, state: "TrainState") -> "StructuralChange | None":
        """What happens before this step (0 is before the first). Must be a function of the settings, the step and
        the state's values; a decision already in the state's log is taken from there."""
        return None

    def footprint(self, footprint: Footprint) -> Footprint:
        """What to add to the count. Memory and work of a technique are counted on a traced step; override this only
        for what such a trace cannot show: what other ranks take over, or what depends on values."""
        return footprint

    def change_forward(self, model: nn.Module) -> None:
        """Change the model's forward pass to do what `objective` and `backward` do in the trainer, for a training loop
        of the user's own. Raises NeedsTrainer, with nothing changed, for settings with which it cannot."""

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Do by hooks of an optimizer's steps what `backward` does in the trainer, for a loop of the user's own."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Take off what `model` put on while keeping the function, for export as the plain architecture."""
        return model

    def holds(self, state: "TrainState") -> None:
        """Raises `IntegrityError` when a promise is broken; asked at the start, after each change, after each
        update that moves masks, and at the end."""
