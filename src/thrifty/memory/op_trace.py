"""Operation traces of a block: operations in order, their inputs, their outputs, and the outputs that autograd saves.

An *item* (`OpOutput`) is the output of an operation, including later in-place writes to it. A view belongs to the item
that it shows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from thrifty.core.errors import RefusedError
from thrifty.core.tensor_tracing import EagerTrace, storage_bytes, tensors_in
from thrifty.memory.saved_tensor_hooks import SMALLEST, base_storage, is_quantizable

UNDECLARED_WRITERS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Operations that write running statistics without declaring it in their schema."""

SMALL = 8
"""Size ratio for small results. A result is small, such as the statistics of a norm, if it is this many times smaller
than the largest result of its operation. Small results are kept.
"""

INPUT = -1
"""Item number that stands for a block's input."""

Where = Callable[[], str]
"""Function that returns the name of the running module."""

Cost = Callable[[Any, tuple, dict, Any], float]
"""Function that returns the seconds of an operation, from its function, arguments, keyword arguments and result."""


@dataclass
class OpOutput:
    """Storages that one operation creates, with their values after the last write."""

    number: int
    name: str
    where: str
    """Name of the operation's module inside the block; "" for the block itself."""
    bytes: int
    seconds: float = 0.0
    reads: set[int] = field(default_factory=set)
    """Numbers of the items that this item is computed from. Inputs from outside the block are not listed."""
    last_write: int = -1
    saved_bytes: int = 0
    """Bytes of the item that autograd saves for the backward pass. For a norm, these may be only the statistics."""
    storable: bool = True
    """False if an operation reads the item before a later operation writes to it. Then no single value can be stored.
    """
    repeatable: bool = True
    """False if computing the item also writes outside the block, for example to running statistics."""
    quantizable: bool = True
    """True if quantization reduces the item's size."""
    itemsize: int = 4
    """Bytes per element."""
    is_dropout_mask: bool = False
    """True if the values are random zeros and ones (a dropout mask)."""

    @property
    def saved(self) -> bool:
        return self.saved_bytes > 0


class SavedTensor(NamedTuple):
    """A storage that autograd saves, in the form that an activation store receives."""

    owner: int | None
    """Number of the item that contains the storage, or `INPUT`; None if the storage must stay on the device."""
    bytes: int
    is_small: bool = False
    """True for small results of an operation, such as norm statistics. They are not quantized."""


@dataclass
class OpTrace:
    """Operations of one block call."""

    operations: list[str] = field(default_factory=list)
    owners: list[int | None] = field(default_factory=list)
    """For each operation, the item that it creates or writes to; None for views."""
    outside: set[int] = field(default_factory=set)
    """Operations whose only effect is a write outside the block. They must run only once."""
    items: dict[int, OpOutput] = field(default_factory=dict)
    """Items by number, in the order of their operations."""
    input_bytes: int = 0
    movable_input: int = 0
    """Bytes of the input, if the previous call created it only for this call."""
    input_itemsize: int = 4
    """Bytes per element of the movable input."""
    saved_tensors: list[SavedTensor] = field(default_factory=list)
    """Saved tensors in the order of the forward pass."""

    @property
    def saved_bytes(self) -> int:
        return sum(item.saved_bytes for item in self.items.values())


def record(
    function: Callable[..., Any], args: tuple, kwargs: dict, cost: Cost, where: Where, movable: Tensor | None = None
) -> tuple[Any, OpTrace]:
    """Run a function forward with gradients enabled, and return its result and its trace.

    No tensors are saved, so no backward pass is possible. The only argument that may be offloaded is `movable`.
    """
    recording = _OpRecorder(tensors_in((args, kwargs)), cost, where)
    if movable is not None:
        recording.movable = movable.untyped_storage()._cdata
        recording.tape.movable_input = movable.untyped_storage().nbytes()
        recording.tape.input_itemsize = movable.element_size()
    with same_casts(), torch.autograd.graph.saved_tensors_hooks(recording.saves, _refuse_unpack), recording:
        result = function(*args, **kwargs)
    return result, recording.tape


@contextmanager
def same_casts() -> Iterator[None]:
    """Switch off the autocast cache inside the `with` block, so that each use of a weight has its own cast.

    With the cache, the operations of a block would depend on operations that ran before the block.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def is_counted(func: Any) -> bool:
    """Return False for operations that traces skip: `prim` queries, and `detach`, which autograd adds unpredictably."""
    return func is not torch.ops.aten.detach.default and func.namespace != "prim"


def _refuse_unpack(packed: None) -> Tensor:
    raise AssertionError("a recorded forward pass has no backward pass")


class _OpRecorder(EagerTrace):
    def __init__(self, inputs: Sequence[Tensor], cost: Cost, where: Where):
        super().__init__()
        self.tape, self.cost, self.where = OpTrace(input_bytes=storage_bytes(inputs)), cost, where
        self.block = where()
        self.read_items: set[int] = set()
        self.seen_saved: set[int] = set()
        self.seen_versions: dict[int, int] = {}
        self.movable: int | None = None
        # weak references also prevent that storage addresses are reused
        self.owners: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _reads_values(func, args):
            raise RefusedError(
                f"{f'the block {self.block!r}' if self.block else 'the traced block'} depends on values of tensors "
                f"({_short(func)!r}), so its operations can change from step to step",
                fix="use memory.recompute with its default schedule, which recomputes whole blocks",
            )
        result = func(*args, **kwargs)
        if is_counted(func):
            self.record_operation(func, args, kwargs, result)
        return result

    def saves(self, tensor: Tensor) -> None:
        self.note_saved_tensor(tensor)
        owner, storage = self.owner(tensor), tensor.untyped_storage()
        if owner is not None and storage._cdata not in self.seen_saved:
            self.seen_saved.add(storage._cdata)
            self.tape.items[owner].saved_bytes += storage.nbytes()

    def note_saved_tensor(self, tensor: Tensor) -> None:
        whole = base_storage(tensor, SMALLEST)
        if whole is None or self.seen_versions.get(whole.untyped_storage()._cdata) == whole._version:
            return
        storage, owner = whole.untyped_storage(), self.owner(whole)
        self.seen_versions[storage._cdata] = whole._version
        is_small = owner is not None and storage.nbytes() * SMALL <= self.tape.items[owner].bytes
        if storage._cdata == self.movable:
            owner = INPUT
        self.tape.saved_tensors.append(SavedTensor(owner, storage.nbytes(), is_small))

    def record_operation(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        number, items = len(self.tape.operations), self.tape.items
        inputs = tensors_in((args, kwargs))
        targets = list(_written(func, args, kwargs))
        written = self.owners_of(targets)
        reads = self.owners_of(inputs) - written
        new = self.new_results(inputs, result)
        if new:
            items[number] = OpOutput(number, _short(func), self.module(), storage_bytes(new), reads=reads)
            items[number].quantizable = is_quantizable(new[0])
            items[number].itemsize = new[0].element_size()
            for storage in (StorageWeakRef(tensor.untyped_storage()) for tensor in new):
                self.owners[storage.cdata] = storage, number
        for item in (items[owner] for owner in written):
            item.reads |= reads
            item.storable &= item.number not in self.read_items
        owner = number if new else min(written, default=None)
        if _short(func) in UNDECLARED_WRITERS or any(self.owner(target) is None for target in targets):
            if owner is None:
                self.tape.outside.add(number)
            else:
                items[owner].repeatable = False
        if owner is not None:
            items[owner].seconds += self.cost(func, args, kwargs, result)
            items[owner].last_write = number
            items[owner].is_dropout_mask |= torch.Tag.nondeterministic_seeded in func.tags and "bernoulli" in str(func)
            self.read_items |= reads
        self.tape.operations.append(str(func))
        self.tape.owners.append(owner)

    def new_results(self, inputs: Sequence[Tensor], result: Any) -> list[Tensor]:
        """Return the results with new storages. Results that share storage with an argument are left out."""
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        return [tensor for tensor in tensors_in(result) if tensor.untyped_storage()._cdata not in before]

    def owner(self, tensor: Tensor) -> int | None:
        known = self.owners.get(tensor.untyped_storage()._cdata)
        return None if known is None else known[1]

    def owners_of(self, tensors: Sequence[Tensor] | Iterator[Tensor]) -> set[int]:
        return {owner for tensor in tensors if (owner := self.owner(tensor)) is not None}

    def module(self) -> str:
        return self.where().removeprefix(self.block).lstrip(".")


def _short(func: Any) -> str:
    return str(func).partition(".")[2].partition(".")[0].strip("_")


def _reads_values(func: Any, args: tuple) -> bool:
    """Return True if the result's shape, or Python control flow, depends on values.

    Torch tags all indexing operations as dependent on values, but only indexing with masks depends on values.
    """
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(func.tags)


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)
