"""Activation compression (Chen et al. 2021): quantize saved activations to 2, 4 or 8 bits.

Paper       Chen et al. 2021, ActNN (arXiv 2104.14129); any model and sensitivity: Liu et al. 2022, GACT (arXiv
            2206.11357); range per head: Pan et al. 2021, Mesa (arXiv 2111.11124).
Promise     Saved activations take `bits` + 1/8 bits per element instead of 32 or 16; dropout masks take one.
Use         model = thrifty.apply(model, "compress_activations", bits=4)
Start with  `compress_activations:bits=4`; 8 bits if the loss suffers, 2 only with tests.
Cost        A quantization pass forward, a dequantization pass backward, and noisy gradients. Without a C++ compiler
            (`thrifty doctor`) both passes are several times slower.
Avoid       Narrow models, where quantization is slow compared with computation.
Does not    Change the forward pass: the first loss is bit-identical. Parameters, integers, row statistics of norms and
            attention, and the loss stay exact.
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
"""Bits that adaptive tensors may get."""
TENSORS = 4096
"""Saved tensors of a forward pass that are decided on singly; later ones get the average."""
PROBED = 8
"""Sensitivity is measured on one in so many examples of a micro-batch."""


class QuantizingObjective(WrappedObjective):
    """Another objective whose predictions are made with a new keeper each."""

    def __init__(self, inner: Objective, keeper: Callable[[nn.Module, Batch], QuantizedStore]):
        super().__init__(inner)
        self.keeper = keeper

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if not torch.is_grad_enabled():
            return super().predict(model, batch)
        with use_activation_store(self.keeper(model, batch), smallest=1):
            return super().predict(model, batch)


class QuantizingBackward:
    """A backward pass whose forward passes leave their activations in codes.

    `state` counts the calls. With `adaptive` it also holds how many tensors and rows the first forward pass of the last
    call had, for how many tensors bits were decided, and those bits.
    """

    def __init__(self, inner: Backward, settings: "CompressActivations"):
        self.inner, self.settings = inner, settings
        # values that can be read even where only shapes are traced, unlike those of torch.zeros
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

        def keeper(model: nn.Module, part: Batch) -> QuantizedStore:
            nonlocal rows
            rows = rows or len(part)
            passes.append(self.keeper(model, part, f"{calls}/{len(passes)}", bits))
            return passes[-1]

        outcome = self.inner(model, QuantizingObjective(objective, keeper), batch)
        self.state["calls"].fill_(calls + 1)
        if self.settings.adaptive and passes:
            self.state["tensors"].fill_(len(passes[0].numbers))
            self.state["rows"].fill_(rows)
        return replace(outcome, notes=outcome.notes | notes)

    def keeper(
        self, model: nn.Module, batch: Batch, key: str, bits: Callable[[int], int], like: QuantizedStore | None = None
    ) -> QuantizedStore:
        # the loop seeds torch's generator with the run, the step and the rank; nothing is drawn from it
        seed = seed_of(f"{torch.initial_seed()}/{key}") % 2**32
        alive = frozenset(t.untyped_storage()._cdata for t in (*model.buffers(), *batch.fields.values()))
        s = self.settings
        return QuantizedStore(seed, bits, s.group, s.ranges == "head", s.min_elements, alive, like)

    def decided(self) -> Callable[[int], int]:
        """Bits by position, the average where nothing is decided."""
        decided = self.state.get("bits")
        if decided is None or isinstance(decided, FakeTensor):
            return lambda position: self.settings.bits
        bits = decided.tolist()
        return lambda position: (bits[position] if position < TENSORS else 0) or self.settings.bits

    def adapt(self, model: nn.Module, objective: Objective, batch: Batch, calls: int) -> dict[str, float]:
        """Measure and decide, where that is due or the tensors are no longer those that were decided on."""
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
        """For each tensor what it does to the gradient of some of these examples to be kept in 4 bits while all others
        have 8; and how many numbers each has."""
        whole = self.keeper(model, batch, "whole", self.decided())
        # the list of saved tensors comes from a forward pass of a whole micro-batch
        with preserve_gradients(model):
            QuantizingObjective(objective, lambda *_: whole).predict(model, batch)
        part = batch.rows(0, max(len(batch) // PROBED, 1))

        def run(disturbed: int | None) -> None:
            keeper = self.keeper(model, part, "part", lambda position: 4 if position == disturbed else 8, whole)
            plain_backward(model, QuantizingObjective(objective, lambda *_: keeper), part)

        return sensitivities(run, model, len(whole.numbers)), whole.numbers


class CompressActivations(Technique):
    """Rounding is stochastic: each restored tensor has the saved one as its expectation, including ranges rounded to
    bfloat16. Gradients of matrices are therefore unbiased. After functions that are not linear in what they save (GELU,
    softmax, norms) gradients are unbiased to first order. Exact zeros stay zero, and no positive value of a
    non-negative tensor becomes zero, which ReLU's gradient requires. Adaptive bits help if tensors differ much in
    sensitivity."""

    stage, numerics = Stage.COMPRESS, Numerics.DIFFERENT
    claims = frozenset({Claim.SAVED_TENSORS})

    bits: Literal[2, 4, 8] = 4
    """For each number; the average with `adaptive`."""
    group: Positive = GROUP
    """Neighbours that share a range, a multiple of 8."""
    ranges: Literal["group", "head"] = "group"
    """What shares a range: neighbours of one token, or over all tokens a head, or `group` neighbouring channels where
    a tensor shows no heads."""
    min_elements: Positive = SMALLEST
    """Tensors of fewer numbers stay as they are."""
    adaptive: bool = False
    """2, 4 or 8 bits for each tensor by how much it disturbs the gradient, at the same total. That is measured, tensor
    by tensor, on an eighth of a micro-batch."""
    every: Positive = 1000
    """Steps from one measurement to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group % 8:
            raise UsageError(f"{self.name}: group is {self.group}", fix=f"a multiple of 8: {-(-self.group // 8) * 8}")
        if self.adaptive and self.bits != 4:
            raise UsageError(
                f"{self.name}: of 2, 4 and 8 bits an average of {self.bits} leaves no choice",
                fix="adaptive goes with bits = 4",
            )

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def change_forward(self, model: nn.Module) -> None:
        if self.adaptive:
            raise NeedsTrainer(
                f"{self.name}: adaptive bits are measured in backward passes, which only the trainer makes",
                fix="adaptive=False",
            )
        stores, calls = QuantizingBackward(plain_backward, self), count()

        def quantized(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            batch = Batch({str(place): each for place, each in enumerate(inputs)}, torch.empty(0))
            store = stores.keeper(model, batch, str(next(calls)), stores.decided())
            with use_activation_store(store, smallest=1):
                return inner(*args, **kwargs)

        wrap_forward(model, quantized)

    def backward(self, backward: Backward) -> Backward:
        return QuantizingBackward(backward, self)
