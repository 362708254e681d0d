"""Activation compression (Chen et al. 2021): quantize saved activations to 2, 4 or 8 bits.

Paper       Chen et al. 2021, ActNN (arXiv 2104.14129). The method for any model and the sensitivity are from Liu et al.
            2022, GACT (arXiv 2206.11357), and ranges per head from Pan et al. 2021, Mesa (arXiv 2111.11124).
Promise     Saved activations take `bits` + 1/8 bits per element instead of 32 or 16. Dropout masks take 1 bit per
            element.
Use         model = thrifty.apply(model, "compress_activations", bits=4)
Start with  `compress_activations:bits=4`. Use 8 bits if the loss gets worse, and 2 bits only after a test.
Cost        Quantization in the forward pass, dequantization in the backward pass, and noisy gradients. Without a C++
            compiler (`thrifty doctor`) quantization is several times slower.
Avoid       Narrow models, because quantization is slow compared with their computation.
Does not    Change the forward pass (the first loss is bit-identical), or compress parameters, integers, the loss, or
            row statistics of norms and attention.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from thrifty.core.backward import Backward, BackwardResult, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, UsageError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import seed_of
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.quantization_ranges import GROUP
from thrifty.memory.planner.bit_allocation import allocate_bits
from thrifty.memory.quantized_store import QuantizedStore
from thrifty.memory.saved_tensor_hooks import SMALLEST, use_activation_store
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.techniques.memory._gradient_sensitivity import preserve_gradients, sensitivities

CHOICES = (2, 4, 8)
"""Bits per element among which `adaptive` chooses."""
TENSORS = 4096
"""Maximum number of saved tensors per forward pass with separately chosen bits. Later tensors use the average bits."""
PROBED = 8
"""Divisor of a micro-batch: sensitivity is measured on 1 / `PROBED` of the examples."""


class QuantizingObjective(WrappedObjective):
    """Wrapper of an objective that quantizes the activations of each prediction in a new store."""

    def __init__(self, inner: Objective, new_store: Callable[[nn.Module, Batch], QuantizedStore]):
        super().__init__(inner)
        self.new_store = new_store

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if not torch.is_grad_enabled():
            return super().predict(model, batch)
        with use_activation_store(self.new_store(model, batch), smallest=1):
            return super().predict(model, batch)


class QuantizingBackward:
    """A backward pass whose forward passes quantize their activations.

    `state` has the number of calls, and the numbers of saved tensors and of examples in the first forward pass of the
    last call. With `adaptive`, `state` also has the bits chosen for each tensor, and the number of tensors at the time
    of the choice.
    """

    def __init__(self, inner: Backward, settings: "CompressActivations"):
        self.inner, self.settings = inner, settings
        # torch.tensor is readable while shapes are traced, torch.zeros is not
        self.state = {"calls": torch.tensor(0)}
        if settings.adaptive:
            self.state |= {name: torch.tensor(0) for name in ("tensors", "rows", "decided")}
            self.state["bits"] = torch.zeros(TENSORS, dtype=torch.uint8)

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        calls, notes = int(self.state["calls"]), {}
        if self.settings.adaptive and calls > 0:
            notes = self.adapt(model, objective, batch, calls)
        bits, passes = self.decided(), list[QuantizedStore]()
        rows = 0

        def new_store(model: nn.Module, part: Batch) -> QuantizedStore:
            nonlocal rows
            rows = rows or len(part)
            passes.append(self.store(model, part, f"{calls}/{len(passes)}", bits))
            return passes[-1]

        outcome = self.inner(model, QuantizingObjective(objective, new_store), batch)
        self.state["calls"].fill_(calls + 1)
        if self.settings.adaptive and passes:
            self.state["tensors"].fill_(len(passes[0].numbers))
            self.state["rows"].fill_(rows)
        return replace(outcome, notes=outcome.notes | notes)

    def store(
        self, model: nn.Module, batch: Batch, key: str, bits: Callable[[int], int], like: QuantizedStore | None = None
    ) -> QuantizedStore:
        # the loop seeds torch's generator with the run, the step and the rank; the seed is only read
        seed = seed_of(f"{torch.initial_seed()}/{key}") % 2**32
        alive = frozenset(t.untyped_storage()._cdata for t in (*model.buffers(), *batch.fields.values()))
        s = self.settings
        return QuantizedStore(seed, bits, s.group, s.ranges == "head", s.min_elements, alive, like)

    def decided(self) -> Callable[[int], int]:
        """Return a function from a tensor's position to its bits. Tensors without chosen bits use the average bits."""
        decided = self.state.get("bits")
        if decided is None or isinstance(decided, FakeTensor):
            return lambda position: self.settings.bits
        bits = decided.tolist()
        return lambda position: (bits[position] if position < TENSORS else 0) or self.settings.bits

    def adapt(self, model: nn.Module, objective: Objective, batch: Batch, calls: int) -> dict[str, float]:
        """Choose the bits of each tensor by its sensitivity, if `every` calls have passed or the number of tensors
        changed.

        Return the fractions of elements with 2, 4 and 8 bits by name; empty if nothing was chosen.
        """
        tensors, rows, decided = (int(self.state[name]) for name in ("tensors", "rows", "decided"))
        if (calls - 1) % self.settings.every and tensors == decided:
            return {}
        sensitivity, numbers = self.measure(model, objective, batch.rows(0, rows))
        self.state["decided"].fill_(tensors)
        if not numbers or not all(map(math.isfinite, sensitivity)):
            return {}
        bits = allocate_bits(sensitivity[:TENSORS], numbers[:TENSORS], self.settings.bits, CHOICES)
        self.state["bits"].zero_()[: len(bits)] = torch.tensor(bits, dtype=torch.uint8)
        shares = {b: sum(n for n, own in zip(numbers, bits, strict=False) if own == b) / sum(numbers) for b in CHOICES}
        return {f"share_in_{b}_bits": share for b, share in shares.items()}

    def measure(self, model: nn.Module, objective: Objective, batch: Batch) -> tuple[list[float], list[int]]:
        """Return the sensitivity of the gradient to each tensor, and the number of elements of each.

        For each measurement one tensor has 4 bits and all other tensors 8 bits, on a fraction of the examples.
        """
        whole = self.store(model, batch, "whole", self.decided())
        # the forward pass of a whole micro-batch lists the saved tensors
        with preserve_gradients(model):
            QuantizingObjective(objective, lambda *_: whole).predict(model, batch)
        part = batch.rows(0, max(len(batch) // PROBED, 1))

        def run(perturbed: int | None) -> None:
            store = self.store(model, part, "part", lambda position: 4 if position == perturbed else 8, whole)
            plain_backward(model, QuantizingObjective(objective, lambda *_: store), part)

        return sensitivities(run, model, len(whole.numbers)), whole.numbers


class CompressActivations(Technique):
    """Rounding is stochastic, so the expected value of each dequantized tensor is the saved tensor, although ranges are
    rounded to bfloat16. Gradients of weight matrices are therefore unbiased. For functions that are nonlinear in their
    saved tensors (GELU, softmax, norms), gradients are unbiased to first order. Zeros stay exactly zero. Positive
    values of a non-negative tensor stay positive, because ReLU's gradient requires this. Adaptive bits help if the
    gradient is much more sensitive to some tensors than to others."""

    stage, numerics = Stage.COMPRESS, Numerics.DIFFERENT
    claims = frozenset({Claim.SAVED_TENSORS})

    bits: Literal[2, 4, 8] = 4
    """Bits per element; with `adaptive`, the average bits."""
    group: Positive = GROUP
    """Number of neighboring elements that share a range, a multiple of 8."""
    ranges: Literal["group", "head"] = "group"
    """Elements that share a range: neighboring elements of one token ("group"), or one attention head over all tokens
    ("head"). If a tensor has no heads, "head" uses `group` neighboring channels."""
    min_elements: Positive = SMALLEST
    """Minimum number of elements of a compressed tensor."""
    adaptive: bool = False
    """True to choose 2, 4 or 8 bits for each tensor by its effect on the gradient, at the same total size. The effect
    of each tensor is measured on an eighth of a micro-batch."""
    every: Positive = 1000
    """Number of steps between measurements."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group % 8:
            raise UsageError(
                f"{self.name}: group is {self.group}, not a multiple of 8",
                fix=f"--set techniques.{self.name}.group={-(-self.group // 8) * 8}",
            )
        if self.adaptive and self.bits != 4:
            raise UsageError(
                f"{self.name}: adaptive bits of 2, 4 and 8 require an average of 4, and bits is {self.bits}",
                fix=f"--set techniques.{self.name}.bits=4",
            )

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def change_forward(self, model: nn.Module) -> None:
        if self.adaptive:
            raise NeedsTrainer(
                f"{self.name}: adaptive bits are measured in backward passes, which only the trainer runs",
                fix="adaptive=False",
            )
        stores, calls = QuantizingBackward(plain_backward, self), count()

        def quantized(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            batch = Batch({str(place): each for place, each in enumerate(inputs)}, torch.empty(0))
            store = stores.store(model, batch, str(next(calls)), stores.decided())
            with use_activation_store(store, smallest=1):
                return inner(*args, **kwargs)

        wrap_forward(model, quantized)

    def backward(self, backward: Backward) -> Backward:
        return QuantizingBackward(backward, self)
