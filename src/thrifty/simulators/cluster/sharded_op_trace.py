"""What every operation of a pass reads, writes and computes, and which of it tensor parallelism would divide.

Where a tensor would be under tensor parallelism follows from what it is made of, in both passes alike: a product of
something whole with a weight is split (the weight by columns), of something split with a weight a partial sum (by
rows), and partial sums stay so while they are only added to each other; the first other use sums them over the ranks.
For a Transformer that gives Megatron-LM's division (Shoeybi et al. 2019, section 3) without knowing its architecture.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thrifty.core.op_flops import FLOPS_OF
from thrifty.core.tensor_tracing import EagerTrace, tensor_bytes
from thrifty.simulators.cluster.workload import DividedAmount, PassWork

COPIES = frozenset({"_to_copy", "clone", "copy_", "masked_fill", "where", "flip", "cat", "_softmax_backward_data"})
"""Elementwise beside what torch itself tags so, or done by the same kernel as what is."""
WITHIN_A_ROW = frozenset({"_softmax", "_safe_softmax", "_log_softmax"})
"""What a chain of elementwise operations can end in and still be one kernel."""
NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
LOOKUPS = frozenset({"embedding", "index_select"})


class TensorPlacement(Enum):
    """Where a tensor is among the ranks of a tensor group."""

    WHOLE = "on each"
    SPLIT = "divided"
    PARTIAL = "to be summed"
    WEIGHT = "a parameter"


@dataclass
class TracedStorage:
    """One storage: its bytes, where it is, and who makes and reads it."""

    bytes: float
    place: TensorPlacement
    core: bool = False
    """Made of attention's scores, before they meet the values."""
    made_by: int | None = None
    read_by: list[int] = field(default_factory=list)
    saved: bool = False


@dataclass
class TracedOperation:
    section: str
    flops: float
    place: TensorPlacement
    chained: bool
    """Elementwise, so that it can be one kernel with its neighbours."""
    ends_chain: bool
    core: bool
    is_gradient: bool
    """A product that makes the gradient of a weight."""
    is_attention: bool
    """A fused attention kernel."""
    reads: list[tuple[int, float]]
    writes: list[tuple[int, float]]
    reduced: list[float]
    products: int
    """How many products came before: a chain of elementwise operations does not reach across one."""


class OperationTracer(EagerTrace):
    """Writes down the operations run inside it under the name of the section they belong to; "" is not written."""

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor] = ()):
        super().__init__()
        self.section = ""
        self.operations: list[TracedOperation] = []
        self.held: dict[int, TracedStorage] = {}
        self.products = 0
        self.alive: list[Tensor] = []  # so that no storage's address is used twice
        self.saved_in: dict[str, dict[int, None]] = {}
        self.weights_read: dict[int, set[str]] = {}
        self.shapes: set[tuple[int, ...]] = set()
        for parameter in parameters:
            self._hold(parameter, TensorPlacement.WEIGHT)
            self.shapes |= {tuple(parameter.shape), tuple(parameter.shape[::-1])}
        for buffer in buffers:
            self._hold(buffer, TensorPlacement.WHOLE)
        self.there_anyway = frozenset(self.held)

    def save(self, tensor: Tensor) -> Tensor:
        """For `saved_tensors_hooks`: what autograd keeps in this section."""
        key = _key(tensor)
        if self.section and key in self.held and key not in self.there_anyway:
            self.held[key].saved = True
            self.saved_in.setdefault(self.section, {})[key] = None
        return tensor

    def given(self, tensors: Iterable[Tensor]) -> None:
        """Activations that come in from outside of a section: whole."""
        for tensor in tensors:
            self._hold(tensor, TensorPlacement.WHOLE)

    def leaves(self, tensor: Tensor) -> None:
        """A tensor leaves the section: partial sums are summed."""
        value = self.held[_key(tensor)]
        if value.place is TensorPlacement.PARTIAL and value.made_by is not None:
            value.place = TensorPlacement.WHOLE
            self.operations[value.made_by].reduced.append(value.bytes)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.section:
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            addresses = {_key(tensor) for tensor in inputs}
            is_view = not func._schema.is_mutable and all(_key(tensor) in addresses for tensor in made)
            if made and not is_view:
                formula = FLOPS_OF.get(func.overloadpacket)
                flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
                self._record(func, flops, inputs, made)
        return result

    def _record(self, func: Any, flops: float, inputs: list[Tensor], made: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        self.given(inputs)
        sources = {_key(tensor): self.held[_key(tensor)] for tensor in inputs}
        activations = [source for source in sources.values() if source.place is not TensorPlacement.WEIGHT]
        weighted = len(activations) < len(sources)
        for key, source in sources.items():
            if source.place is TensorPlacement.WEIGHT:
                self.weights_read.setdefault(key, set()).add(self.section)
        if not activations and sources:  # a weight in another format is still one
            for tensor in made:
                self._hold(tensor, TensorPlacement.WEIGHT)
            return
        reduced = self._summed(name, activations)
        place = self._place(name, flops > 0 and weighted, activations, made)
        is_gradient = flops > 0 and not weighted and tuple(made[0].shape) in self.shapes
        # the first product of two activations makes scores, the next takes them to the values
        makes_scores = flops > 0 and not weighted and not is_gradient and "scaled_dot_product" not in name
        had_core = any(source.core for source in activations)
        core = had_core if flops == 0 else makes_scores and not had_core
        number = len(self.operations)
        operation = TracedOperation(
            self.section,
            flops,
            TensorPlacement.SPLIT if flops else place,  # every product is divided, by columns or by rows
            chained=torch.Tag.pointwise in func.tags or name in COPIES,
            ends_chain=name in WITHIN_A_ROW,
            core=core,
            is_gradient=is_gradient,
            is_attention="scaled_dot_product" in name,
            reads=[(_key(t), _seen_bytes(t)) for t in inputs if self.held[_key(t)].place is not TensorPlacement.WEIGHT],
            writes=[],
            reduced=reduced,
            products=self.products,
        )
        self.products += flops > 0
        for key, _ in operation.reads:
            self.held[key].read_by.append(number)
        first = inputs[0].shape if inputs else None
        for tensor in made:
            source = self._hold(tensor, place, core, number)
            # gradients of weights are not counted here: they are the same for any number of examples
            if tuple(tensor.shape) not in self.shapes or tensor.shape == first:
                operation.writes.append((_key(tensor), min(_seen_bytes(tensor), source.bytes)))
        self.operations.append(operation)

    def _summed(self, name: str, activations: list[TracedStorage]) -> list[float]:
        """Bytes of the partial sums that this operation needs summed."""
        partial = [value for value in activations if value.place is TensorPlacement.PARTIAL]
        only_added = name in ("add", "add_") and len(partial) == len(activations)
        if not partial or only_added:
            return []
        for value in partial:
            value.place = TensorPlacement.WHOLE
        return [value.bytes for value in partial]

    def _place(
        self, name: str, by_weight: bool, activations: list[TracedStorage], made: list[Tensor]
    ) -> TensorPlacement:
        places = {value.place for value in activations}
        if name in LOOKUPS or TensorPlacement.PARTIAL in places:
            return TensorPlacement.PARTIAL
        if by_weight:
            return TensorPlacement.PARTIAL if TensorPlacement.SPLIT in places else TensorPlacement.SPLIT
        if name in NORMS and made[0].ndim <= 3:
            return TensorPlacement.WHOLE
        return TensorPlacement.SPLIT if TensorPlacement.SPLIT in places else TensorPlacement.WHOLE

    def _hold(
        self, tensor: Tensor, place: TensorPlacement, core: bool = False, made_by: int | None = None
    ) -> TracedStorage:
        key = _key(tensor)
        if key not in self.held:
            self.alive.append(tensor)
            self.held[key] = TracedStorage(float(tensor.untyped_storage().nbytes()), place, core, made_by)
        return self.held[key]

    def work(self, section: str, only_core: bool = False) -> PassWork:
        """The sum over a section's operations."""
        chosen = [
            (number, op)
            for number, op in enumerate(self.operations)
            if op.section == section and (op.core or not only_core)
        ]
        moved, unfused, flops, attention = (DividedAmount() for _ in range(4))
        kernels = 0
        for number, operation in chosen:
            flops += _placed(operation.flops, operation.place)
            attention += _placed(operation.flops * operation.is_attention, operation.place)
            free = [self._is_free(key, number) for key, _ in operation.reads]
            kernels += not (any(free) and (operation.chained or operation.ends_chain))
            for (key, size), is_free in zip(operation.reads, free, strict=True):
                unfused += _placed(size, self.held[key].place)
                moved += DividedAmount() if is_free else _placed(size, self.held[key].place)
            for key, size in operation.writes:
                unfused += _placed(size, self.held[key].place)
                moved += DividedAmount() if self._never_written(key) else _placed(size, self.held[key].place)
        sums = [] if only_core else [size for _, operation in chosen for size in operation.reduced]
        return PassWork(flops, moved, unfused, kernels, sum(sums), len(sums), attention)

    def _is_free(self, key: int, reader: int) -> bool:
        """Whether an operation finds a tensor in registers: its maker is elementwise and in the same kernel."""
        number = self.held[key].made_by
        if number is None or number == reader:
            return False
        maker, reading = self.operations[number], self.operations[reader]
        if (maker.section, maker.products) != (reading.section, reading.products):
            return False
        return maker.chained and (reading.chained or reading.ends_chain)

    def _never_written(self, key: int) -> bool:
        value = self.held[key]
        return bool(value.read_by) and not value.saved and all(self._is_free(key, reader) for reader in value.read_by)

    def for_weights(self, section: str) -> DividedAmount:
        """FLOPs of a section's products that make gradients of weights."""
        made = [op for op in self.operations if op.section == section and op.is_gradient]
        return sum((_placed(op.flops, op.place) for op in made), DividedAmount())

    def saved(self, section: str, only_core: bool = False) -> DividedAmount:
        """Bytes that autograd keeps of a section."""
        kept = [
            value
            for key in self.saved_in.get(section, {})
            if (value := self.held[key]).place is not TensorPlacement.WEIGHT
        ]
        return sum((_placed(h.bytes, h.place) for h in kept if h.core or not only_core), DividedAmount())


def _placed(amount: float, place: TensorPlacement) -> DividedAmount:
    return DividedAmount(split=amount) if place is TensorPlacement.SPLIT else DividedAmount(whole=amount)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _seen_bytes(tensor: Tensor) -> float:
    """Of the elements that there are: those repeated by a stride of zero are read once."""
    return float(min(tensor_bytes(tensor), tensor.untyped_storage().nbytes()))
