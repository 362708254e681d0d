"""Trace of a pass: bytes and FLOPs of each operation, and their division by tensor parallelism.

The placement of a tensor follows from the placements of the operation's inputs, in both passes. The product of a whole
tensor and a weight is split (column-parallel weight). The product of a split tensor and a weight is a partial sum
(row-parallel weight). The sum of partial sums is partial. Any other use requires an all-reduce. For a Transformer, the
result is Megatron-LM's tensor parallelism (Shoeybi et al. 2019, section 3). The rules do not use the architecture.
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
"""Elementwise operations without torch's pointwise tag, and operations that fuse with elementwise operations."""
WITHIN_A_ROW = frozenset({"_softmax", "_safe_softmax", "_log_softmax"})
"""Operations that can be fused at the end of a chain of elementwise operations."""
NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
LOOKUPS = frozenset({"embedding", "index_select"})


class TensorPlacement(Enum):
    """The placement of a tensor on the ranks of a tensor group."""

    WHOLE = "on each"
    SPLIT = "divided"
    PARTIAL = "to be summed"
    WEIGHT = "a parameter"


@dataclass
class TracedStorage:
    """Storage of tensors: bytes, placement, and the operations that write and read the storage."""

    bytes: float
    place: TensorPlacement
    core: bool = False
    """True for attention scores and tensors computed from scores, before the product with values."""
    made_by: int | None = None
    read_by: list[int] = field(default_factory=list)
    saved: bool = False


@dataclass
class TracedOperation:
    section: str
    flops: float
    place: TensorPlacement
    chained: bool
    """True if the operation is elementwise and can be fused with neighboring operations."""
    ends_chain: bool
    core: bool
    is_gradient: bool
    """True for a matrix product that computes the gradient of a weight."""
    is_attention: bool
    """True for a fused attention kernel."""
    reads: list[tuple[int, float]]
    writes: list[tuple[int, float]]
    reduced: list[float]
    products: int
    """Number of earlier matrix products. A chain of elementwise operations ends at a product."""


class OperationTracer(EagerTrace):
    """Recorder of the operations within its context, by section. Section "" is not recorded."""

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor] = ()):
        super().__init__()
        self.section = ""
        self.operations: list[TracedOperation] = []
        self.storages: dict[int, TracedStorage] = {}
        self.products = 0
        self.alive: list[Tensor] = []  # keeps addresses of storages unique
        self.saved_in: dict[str, dict[int, None]] = {}
        self.weights_read: dict[int, set[str]] = {}
        self.shapes: set[tuple[int, ...]] = set()
        for parameter in parameters:
            self._add(parameter, TensorPlacement.WEIGHT)
            self.shapes |= {tuple(parameter.shape), tuple(parameter.shape[::-1])}
        for buffer in buffers:
            self._add(buffer, TensorPlacement.WHOLE)
        self.permanent = frozenset(self.storages)

    def save(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves in the current section. This is a hook for `saved_tensors_hooks`."""
        key = _key(tensor)
        if self.section and key in self.storages and key not in self.permanent:
            self.storages[key].saved = True
            self.saved_in.setdefault(self.section, {})[key] = None
        return tensor

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Record input activations of the section as whole tensors."""
        for tensor in tensors:
            self._add(tensor, TensorPlacement.WHOLE)

    def sum_output(self, tensor: Tensor) -> None:
        """Record the all-reduce of a partial sum that leaves the section."""
        value = self.storages[_key(tensor)]
        if value.place is TensorPlacement.PARTIAL and value.made_by is not None:
            value.place = TensorPlacement.WHOLE
            self.operations[value.made_by].reduced.append(value.bytes)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.section:
            inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            outputs = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            addresses = {_key(tensor) for tensor in inputs}
            is_view = not func._schema.is_mutable and all(_key(tensor) in addresses for tensor in outputs)
            if outputs and not is_view:
                formula = FLOPS_OF.get(func.overloadpacket)
                flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
                self._record(func, flops, inputs, outputs)
        return result

    def _record(self, func: Any, flops: float, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        self.add_inputs(inputs)
        sources = {_key(tensor): self.storages[_key(tensor)] for tensor in inputs}
        activations = [source for source in sources.values() if source.place is not TensorPlacement.WEIGHT]
        weighted = len(activations) < len(sources)
        for key, source in sources.items():
            if source.place is TensorPlacement.WEIGHT:
                self.weights_read.setdefault(key, set()).add(self.section)
        if not activations and sources:  # a weight that is cast to another format is still a weight
            for tensor in outputs:
                self._add(tensor, TensorPlacement.WEIGHT)
            return
        reduced = self._summed(name, activations)
        place = self._place(name, flops > 0 and weighted, activations, outputs)
        is_gradient = flops > 0 and not weighted and tuple(outputs[0].shape) in self.shapes
        # the first product of two activations computes scores, the next product multiplies scores by values
        makes_scores = flops > 0 and not weighted and not is_gradient and "scaled_dot_product" not in name
        had_core = any(source.core for source in activations)
        core = had_core if flops == 0 else makes_scores and not had_core
        number = len(self.operations)
        operation = TracedOperation(
            self.section,
            flops,
            TensorPlacement.SPLIT if flops else place,  # every product is divided by columns or rows
            chained=torch.Tag.pointwise in func.tags or name in COPIES,
            ends_chain=name in WITHIN_A_ROW,
            core=core,
            is_gradient=is_gradient,
            is_attention="scaled_dot_product" in name,
            reads=[
                (_key(t), _seen_bytes(t)) for t in inputs if self.storages[_key(t)].place is not TensorPlacement.WEIGHT
            ],
            writes=[],
            reduced=reduced,
            products=self.products,
        )
        self.products += flops > 0
        for key, _ in operation.reads:
            self.storages[key].read_by.append(number)
        first = inputs[0].shape if inputs else None
        for tensor in outputs:
            source = self._add(tensor, place, core, number)
            # gradients of weights are not counted here: their bytes do not depend on the number of examples
            if tuple(tensor.shape) not in self.shapes or tensor.shape == first:
                operation.writes.append((_key(tensor), min(_seen_bytes(tensor), source.bytes)))
        self.operations.append(operation)

    def _summed(self, name: str, activations: list[TracedStorage]) -> list[float]:
        """Return the bytes of each partial sum that must be all-reduced before the operation."""
        partial = [value for value in activations if value.place is TensorPlacement.PARTIAL]
        only_added = name in ("add", "add_") and len(partial) == len(activations)
        if not partial or only_added:
            return []
        for value in partial:
            value.place = TensorPlacement.WHOLE
        return [value.bytes for value in partial]

    def _place(
        self, name: str, by_weight: bool, activations: list[TracedStorage], outputs: list[Tensor]
    ) -> TensorPlacement:
        places = {value.place for value in activations}
        if name in LOOKUPS or TensorPlacement.PARTIAL in places:
            return TensorPlacement.PARTIAL
        if by_weight:
            return TensorPlacement.PARTIAL if TensorPlacement.SPLIT in places else TensorPlacement.SPLIT
        if name in NORMS and outputs[0].ndim <= 3:
            return TensorPlacement.WHOLE
        return TensorPlacement.SPLIT if TensorPlacement.SPLIT in places else TensorPlacement.WHOLE

    def _add(
        self, tensor: Tensor, place: TensorPlacement, core: bool = False, made_by: int | None = None
    ) -> TracedStorage:
        key = _key(tensor)
        if key not in self.storages:
            self.alive.append(tensor)
            self.storages[key] = TracedStorage(float(tensor.untyped_storage().nbytes()), place, core, made_by)
        return self.storages[key]

    def work(self, section: str, only_core: bool = False) -> PassWork:
        """Return the work of all operations of a section."""
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
                unfused += _placed(size, self.storages[key].place)
                moved += DividedAmount() if is_free else _placed(size, self.storages[key].place)
            for key, size in operation.writes:
                unfused += _placed(size, self.storages[key].place)
                moved += DividedAmount() if self._never_written(key) else _placed(size, self.storages[key].place)
        sums = [] if only_core else [size for _, operation in chosen for size in operation.reduced]
        return PassWork(flops, moved, unfused, kernels, sum(sums), len(sums), attention)

    def _is_free(self, key: int, reader: int) -> bool:
        """Return True if reading moves no bytes, because the reading operation is fused with the operation that wrote
        the storage."""
        number = self.storages[key].made_by
        if number is None or number == reader:
            return False
        maker, reading = self.operations[number], self.operations[reader]
        if (maker.section, maker.products) != (reading.section, reading.products):
            return False
        return maker.chained and (reading.chained or reading.ends_chain)

    def _never_written(self, key: int) -> bool:
        value = self.storages[key]
        return bool(value.read_by) and not value.saved and all(self._is_free(key, reader) for reader in value.read_by)

    def for_weights(self, section: str) -> DividedAmount:
        """Return the FLOPs of the matrix products of a section that compute gradients of weights."""
        products = [op for op in self.operations if op.section == section and op.is_gradient]
        return sum((_placed(op.flops, op.place) for op in products), DividedAmount())

    def saved(self, section: str, only_core: bool = False) -> DividedAmount:
        """Return the bytes of activations that autograd saves in a section."""
        storages = [
            value
            for key in self.saved_in.get(section, {})
            if (value := self.storages[key]).place is not TensorPlacement.WEIGHT
        ]
        return sum((_placed(s.bytes, s.place) for s in storages if s.core or not only_core), DividedAmount())


def _placed(amount: float, place: TensorPlacement) -> DividedAmount:
    return DividedAmount(split=amount) if place is TensorPlacement.SPLIT else DividedAmount(whole=amount)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _seen_bytes(tensor: Tensor) -> float:
    """Return the bytes of distinct elements. Expanded elements (stride 0) count once."""
    return float(min(tensor_bytes(tensor), tensor.untyped_storage().nbytes()))
