"""The operations of a block in the order they run: what each one makes, from what, and what of it autograd saves.

What an operation makes, with what later operations write into it, is an `OpOutput`; views belong to the item they look
at.
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

UNTOLD_WRITERS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Operations that write running statistics although their schema does not say so."""

SMALL = 8
"""An operation's results that are so many times smaller than the largest are kept: the statistics of a norm."""

INPUT = -1
"""Stands beside the numbers of items for what a block is given."""

Where = Callable[[], str]
"""The name of the module that runs at the moment."""

Cost = Callable[[Any, tuple, dict, Any], float]
"""Seconds that an operation takes, from its function, arguments, keyword arguments and result."""


@dataclass
class OpOutput:
    """The storages that one operation makes, as they are after the last write into them."""

    number: int
    """Of the operation."""
    name: str
    where: str
    """The module that it belongs to, by its name inside the block; "" is the block itself."""
    bytes: int
    seconds: float = 0.0
    reads: set[int] = field(default_factory=set)
    """The items it is made from, by number; what comes from outside the block is there anyway."""
    last_write: int = -1
    saved_bytes: int = 0
    """Of its storages that autograd keeps for the backward pass: of a norm it may be the statistics alone."""
    storable: bool = True
    """False where something reads it before it is written to again: there is no one value to store."""
    repeatable: bool = True
    """False where making it also writes into something outside the block, such as running statistics."""
    codable: bool = True
    """Whether codes make it smaller."""
    itemsize: int = 4
    """Bytes of a number."""
    drawn: bool = False
    """Whether its values are drawn: a mask of dropout."""

    @property
    def saved(self) -> bool:
        return self.saved_bytes > 0


class SavedTensor(NamedTuple):
    """A storage that autograd saves, as whoever keeps activations is handed it."""

    owner: int | None
    """Its item, or `INPUT`; None where it has to stay."""
    bytes: int
    is_small: bool = False
    """Beside what its item makes, such as the statistics of a norm: not for codes."""


@dataclass
class OpTrace:
    """One call of a block."""

    operations: list[str] = field(default_factory=list)
    belongs: list[int | None] = field(default_factory=list)
    """For each operation the item that it makes or writes into; None for views."""
    outside: set[int] = field(default_factory=set)
    """Operations that do nothing but write into something outside the block: once is enough."""
    items: dict[int, OpOutput] = field(default_factory=dict)
    """By number, in the order in which they are made."""
    input_bytes: int = 0
    movable_input: int = 0
    """Of these, bytes of what the call before has made for this one alone."""
    input_itemsize: int = 4
    """Bytes of a number of that."""
    handed: list[SavedTensor] = field(default_factory=list)
    """In the order of the forward pass."""

    @property
    def saved_bytes(self) -> int:
        return sum(item.saved_bytes for item in self.items.values())


def record(
    function: Callable[..., Any], args: tuple, kwargs: dict, cost: Cost, where: Where, movable: Tensor | None = None
) -> tuple[Any, OpTrace]:
    """Run a function forward, with gradients, and return its result and its tape. Nothing is saved for a backward
    pass, so there can be none. Of its arguments only `movable` may wait elsewhere."""
    recording = _OpRecorder(tensors_in((args, kwargs)), cost, where)
    if movable is not None:
        recording.movable = movable.untyped_storage()._cdata
        recording.tape.movable_input = movable.untyped_storage().nbytes()
        recording.tape.input_itemsize = movable.element_size()
    with same_casts(), torch.autograd.graph.saved_tensors_hooks(recording.saves, _gone), recording:
        result = function(*args, **kwargs)
    return result, recording.tape


@contextmanager
def same_casts() -> Iterator[None]:
    """Each cast of a weight is made where it is used: under autocast's cache a block's operations would depend on what
    ran before."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def is_counted(func: Any) -> bool:
    """Whether an operation makes or writes something wherever it runs: autograd adds and leaves out `detach` as it
    pleases, and tensors without values are asked for their device."""
    return func is not torch.ops.aten.detach.default and func.namespace != "prim"


def _gone(packed: None) -> Tensor:
    raise AssertionError("there is no backward pass through a recording")


class _OpRecorder(EagerTrace):
    def __init__(self, inputs: Sequence[Tensor], cost: Cost, where: Where):
        super().__init__()
        self.tape, self.cost, self.where = OpTrace(input_bytes=storage_bytes(inputs)), cost, where
        self.block = where()
        self.was_read: set[int] = set()
        self.seen_saved: set[int] = set()
        self.seen_handed: dict[int, int] = {}
        self.movable: int | None = None
        # weak references also keep addresses from being used again
        self.owners: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _reads_values(func, args):
            raise RefusedError(
                f"the block {self.block or 'that is traced'} reads values of tensors ({_short(func)}), so that what it "
                "does changes from step to step",
                fix="use memory.recompute with its default schedule, which runs whole blocks again",
            )
        result = func(*args, **kwargs)
        if is_counted(func):
            self.write_down(func, args, kwargs, result)
        return result

    def saves(self, tensor: Tensor) -> None:
        self.hands(tensor)
        owner, storage = self.owner(tensor), tensor.untyped_storage()
        if owner is not None and storage._cdata not in self.seen_saved:
            self.seen_saved.add(storage._cdata)
            self.tape.items[owner].saved_bytes += storage.nbytes()

    def hands(self, tensor: Tensor) -> None:
        whole = base_storage(tensor, SMALLEST)
        if whole is None or self.seen_handed.get(whole.untyped_storage()._cdata) == whole._version:
            return
        storage, owner = whole.untyped_storage(), self.owner(whole)
        self.seen_handed[storage._cdata] = whole._version
        is_small = owner is not None and storage.nbytes() * SMALL <= self.tape.items[owner].bytes
        if storage._cdata == self.movable:
            owner = INPUT
        self.tape.handed.append(SavedTensor(owner, storage.nbytes(), is_small))

    def write_down(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        number, items = len(self.tape.operations), self.tape.items
        inputs = tensors_in((args, kwargs))
        targets = list(_written(func, args, kwargs))
        written = self.owners_of(targets)
        reads = self.owners_of(inputs) - written
        made = self.made(inputs, result)
        if made:
            items[number] = OpOutput(number, _short(func), self.module(), storage_bytes(made), reads=reads)
            items[number].codable = is_quantizable(made[0])
            items[number].itemsize = made[0].element_size()
            for storage in (StorageWeakRef(tensor.untyped_storage()) for tensor in made):
                self.owners[storage.cdata] = storage, number
        for item in (items[owner] for owner in written):
            item.reads |= reads
            item.storable &= item.number not in self.was_read
        belongs = number if made else min(written, default=None)
        if _short(func) in UNTOLD_WRITERS or any(self.owner(target) is None for target in targets):
            if belongs is None:
                self.tape.outside.add(number)
            else:
                items[belongs].repeatable = False
        if belongs is not None:
            items[belongs].seconds += self.cost(func, args, kwargs, result)
            items[belongs].last_write = number
            items[belongs].drawn |= torch.Tag.nondeterministic_seeded in func.tags and "bernoulli" in str(func)
            self.was_read |= reads
        self.tape.operations.append(str(func))
        self.tape.belongs.append(belongs)

    def made(self, inputs: Sequence[Tensor], result: Any) -> list[Tensor]:
        """The results that are in storages of their own, not in those of arguments."""
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
    """Return True if the shape of the result, or control flow in Python, depends on values. Torch tags all indexing so,
    but only masks have such results."""
    if func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    return not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(func.tags)


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The arguments that an operation writes into."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)
