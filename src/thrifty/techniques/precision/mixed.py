"""Mixed precision (Micikevicius et al. 2018): compute matrix products in bfloat16 or float16.

Paper       Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740). bfloat16: Kalamkar et al. 2019 (arXiv
            1905.12322).
Promise     The speed of 16-bit matrix units, and about half of the activation memory, at the same loss.
Use         model = thrifty.apply(model, "mixed", format="bfloat16")
Start with  `mixed:format=bfloat16`. Use float16 only on GPUs without bfloat16.
Cost        Matmul operands and results have 8 bits of mantissa in bfloat16, and 11 in float16.
Avoid       CPUs without bfloat16 units (`thrifty doctor` reports them). float16 is very slow on CPUs, and overflows
            above 65504 at any loss scale.
Does not    Shrink parameters and optimizer state, or convert norms, softmax and sums from float32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, ThriftyError, UsageError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.setting_bounds import Positive
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import wrap_forward


@dataclass(frozen=True)
class LossScale:
    """A loss scale of 2^exponent and its counters."""

    exponent: int
    clean_steps: int = 0
    """Number of steps since the scale last changed or a step overflowed."""
    passed: int = 0
    """Number of overflows that `hysteresis` tolerated since the scale last grew."""


def next_scale(
    scale: LossScale, finite: bool, growth_interval: int = 2000, hysteresis: int = 1, least: int = 0
) -> LossScale:
    """Return the scale after a step. `finite` is True if all gradients of the step were finite.

    The first `hysteresis` - 1 overflows after a growth are tolerated. Each later overflow halves the scale, but not
    below 2^least. After `growth_interval` clean steps in a row, the scale doubles.
    """
    if not finite:
        if scale.passed + 1 < hysteresis:
            return LossScale(scale.exponent, 0, scale.passed + 1)
        return LossScale(max(scale.exponent - 1, least), 0, scale.passed)
    if scale.clean_steps + 1 >= growth_interval:
        return LossScale(scale.exponent + 1)
    return replace(scale, clean_steps=scale.clean_steps + 1)


def unscale(gradients: Sequence[Tensor], factor: float) -> Tensor:
    """Multiply gradients in place by `factor` (1 / scale). Return a scalar: 0 if all are finite, else 1."""
    overflow = torch.zeros((), device=gradients[0].device)
    inverse = torch.full((), factor, device=overflow.device)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(group, overflow, inverse)
    return overflow


class LossScalingBackward:
    """A backward pass of the loss times a scale. The scale adapts to the range of float16.

    `state` has the number of doublings minus the number of halvings, and the counters of `LossScale`.
    """

    def __init__(self, inner: Backward, settings: "MixedPrecision"):
        self.inner, self.settings = inner, settings
        self.first, self.least = round(math.log2(settings.init_scale)), round(math.log2(settings.min_scale))
        # torch.tensor is readable while shapes are traced, torch.zeros is not
        self.state = {name: torch.tensor(0) for name in ("doublings", "clean_steps", "passed")}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        current = self.scale()
        factor = 2.0**current.exponent
        # the example weights include the scale, since a chunked loss computes gradients in its forward pass
        outcome = self.inner(model, objective, batch.weighted(batch.weight * factor))
        loss = outcome.loss / factor
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        overflow = unscale(local_tensors(gradients), 1 / factor) + ~loss.isfinite()
        # ranks with different parts of the gradients must make the same decision
        finite = isinstance(overflow, FakeTensor) or not bool(mean_over_ranks(overflow))
        then = next_scale(current, finite, self.settings.growth_interval, self.settings.hysteresis, self.least)
        if not finite and then.exponent == current.exponent == self.least and then.passed == current.passed:
            raise ThriftyError(
                f"{self.settings.name}: the loss or gradients are not finite even at min_scale, {factor:g}; "
                "parameters are unchanged",
                fix=f"--set techniques.{self.settings.name}.format=bfloat16; or lower the learning rate",
            )
        self._keep(then)
        notes, growth = outcome.notes | {"loss_scale": factor}, 2.0 ** (then.exponent - current.exponent)
        overflow_handled = outcome.overflow_handled or not finite
        return replace(outcome, loss=loss, notes=notes, overflow_handled=overflow_handled, scale_growth=growth)

    def scale(self) -> LossScale:
        doublings, clean_steps, passed = (int(tensor) for tensor in self.state.values())
        return LossScale(self.first + doublings, clean_steps, passed)

    def _keep(self, scale: LossScale) -> None:
        counts = scale.exponent - self.first, scale.clean_steps, scale.passed
        for tensor, count in zip(self.state.values(), counts, strict=True):
            tensor.fill_(count)


class AutocastObjective(WrappedObjective):
    """Wrapper of an objective that runs the model and its head under autocast. Losses are still computed in float32."""

    def __init__(self, inner: Objective, dtype: torch.dtype):
        super().__init__(inner)
        self.dtype = dtype

    def autocast(self, batch: Batch) -> torch.autocast:
        return torch.autocast(batch.weight.device.type, self.dtype)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        with self.autocast(batch):
            prediction = super().predict(model, batch)
        if prediction.hidden is not None:  # the head is a matmul too
            prediction.hidden = prediction.hidden.to(self.dtype)
        return prediction

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        with self.autocast(batch):
            return super().losses(prediction, batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        with self.autocast(batch):
            return super().scores(prediction, batch)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        with self.autocast(batch):
            return super().normalizers(prediction, batch)


def _with_autocast(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward pass under autocast in bfloat16. Return the results in float32."""
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        result = inner(*args, **kwargs)
    return tree_map_only(Tensor, lambda each: each.float() if each.dtype == torch.bfloat16 else each, result)


class MixedPrecision(Technique):
    """float16 represents magnitudes down to 6e-8, and many gradients are smaller. The loss is therefore multiplied by a
    scale, a power of two, and gradients are divided by the scale. A step that overflows is skipped as a whole and
    halves the scale; after `growth_interval` clean steps the scale doubles. A falling scale is not a sign of
    divergence. Defaults equal torch.amp.GradScaler's. `hysteresis = 2` is the value of DeepSpeed and Megatron. float16
    works only in the trainer, because the trainer stores the scale."""

    stage, numerics = Stage.PRECISION, Numerics.DIFFERENT
    claims = frozenset({Claim.PRECISION})

    format: Literal["bfloat16", "float16"] = "bfloat16"
    init_scale: float = 2.0**16
    """Initial loss scale of float16. bfloat16 ignores this setting and all following settings."""
    growth_interval: Positive = 2000
    """Number of clean steps in a row after which the scale doubles."""
    hysteresis: Positive = 1
    """Number of overflows after which the scale is halved: 1 as in torch, 2 as in DeepSpeed. The count starts again
    when the scale grows."""
    min_scale: float = 1.0
    """Minimum loss scale. An overflow at the minimum stops the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("init_scale", "min_scale"):
            value = getattr(self, name)
            if not (0 < value < math.inf and math.frexp(value)[0] == 0.5):
                raise UsageError(
                    f"{self.name}: {name} is {value!r}, not a power of two",
                    fix=f"--set techniques.{self.name}.{name}=65536; or another power of two",
                )
        if self.min_scale > self.init_scale:
            raise UsageError(
                f"{self.name}: min_scale is {self.min_scale:g}, above the init_scale of {self.init_scale:g}",
                fix=f"--set techniques.{self.name}.min_scale={self.init_scale:g}",
            )

    @property
    def number_format(self) -> Literal["bfloat16", "float16"]:
        return self.format

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective", "backward"})

    def objective(self, objective: Objective) -> Objective:
        return AutocastObjective(objective, getattr(torch, self.format))

    def change_forward(self, model: nn.Module) -> None:
        if self.format == "float16":
            raise NeedsTrainer(
                f"{self.name}: float16 needs a loss scale, which only the trainer keeps",
                fix="format='bfloat16'; or torch.amp.GradScaler around your loss",
            )
        wrap_forward(model, _with_autocast)

    def backward(self, backward: Backward) -> Backward:
        return LossScalingBackward(backward, self) if self.format == "float16" else backward
