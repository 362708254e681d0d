"""Selective recomputation: a plan decides whether each saved tensor of a block is kept, stored or recomputed.

The forward pass stores the tensors that the plan selects, for example offloaded or quantized. Before the block's
backward pass, the required operations run again. Stored tensors replace the results of their operations, and unused
results are not computed.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from thrifty.core.errors import IntegrityError
from thrifty.core.tensor_tracing import tensors_in
from thrifty.memory.op_trace import INPUT, SMALL, OpTrace, is_counted, same_casts
from thrifty.memory.recomputation import recompute
from thrifty.memory.saved_tensor_hooks import SMALLEST, use_activation_store

Store = Callable[[Tensor], Callable[[], Tensor]]
"""Function that stores a tensor, and returns a function that restores it."""


def keep_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@dataclass(frozen=True)
class BlockPlan:
    """Actions for the items (operation outputs) of a trace. An item is stored with a function, recomputed, or unused.

    The entry `INPUT` is the action for the block's input, if the input is stored.
    """

    tape: OpTrace
    stored: Mapping[int, Store]
    recomputed: frozenset[int]

    @property
    def is_plain(self) -> bool:
        """True if all tensors that autograd saves are kept."""
        stay = all(self.stored.get(item.number) is keep_tensor for item in self.tape.items.values() if item.saved)
        return stay and INPUT not in self.stored

    @property
    def is_streamed(self) -> bool:
        """True if nothing is recomputed, so that stored tensors return one by one."""
        return not self.recomputed and not self.is_plain

    @property
    def is_whole(self) -> bool:
        """True if the whole block is recomputed at once: no item is stored or unused, and nothing is written
        outside.
        """
        stored = self.stored.keys() - {INPUT}
        return not stored and not self.tape.outside and self.recomputed == self.tape.items.keys()


def run_block_plan(plan: BlockPlan, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run a block forward by its plan. The backward pass follows the plan too.

    Raises IntegrityError if the block runs other operations than the plan.
    """
    if plan.is_plain:
        return function(*args, **kwargs)
    if plan.is_streamed:
        with same_casts(), use_activation_store(_StorageStream(plan), SMALLEST):
            return function(*args, **kwargs)
    more: dict[str, Any] = {}
    if not plan.is_whole:  # a block recomputed as a whole needs no trace of single operations
        saved = _SavedResults()
        more["context_fn"] = lambda: (_StoringPass(plan, saved), _ReplayPass(plan, saved))
    stores = use_activation_store(_InputHandle(plan, args), SMALLEST) if INPUT in plan.stored else nullcontext()
    with same_casts(), stores:
        return recompute(function, args, kwargs, **more)


def store_large_only(store: Store, size: int) -> Store:
    """Return a store that keeps tensors on the device if they are small compared with `size` bytes."""
    return lambda tensor: keep_tensor(tensor) if tensor.untyped_storage().nbytes() * SMALL <= size else store(tensor)


class _StorageStream:
    """Activation store that passes each saved storage to the store that the plan selects."""

    def __init__(self, plan: BlockPlan):
        self.plan, self.place = plan, 0

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        planned, place = self.plan.tape.saved_tensors, self.place
        self.place += 1
        size = activation.untyped_storage().nbytes()
        if place >= len(planned) or planned[place].bytes != size:
            raise IntegrityError(
                f"a block saved {size:,} bytes as saved tensor {place}, but its plan has a different tensor there",
                fix="use memory.recompute, which works on blocks whose operations change from step to step",
            )
        owner = planned[place].owner
        store = keep_tensor if owner is None else self.plan.stored.get(owner, keep_tensor)
        return None if store is keep_tensor else store(activation)


class _InputHandle:
    """Activation store that stores only the input of a recomputed block."""

    def __init__(self, plan: BlockPlan, args: tuple):
        self.store_input = plan.stored[INPUT]
        self.input = args[0].untyped_storage()._cdata if args and isinstance(args[0], Tensor) else None

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        return self.store_input(activation) if activation.untyped_storage()._cdata == self.input else None


@dataclass
class _SavedResults:
    results: dict[int, Any] = field(default_factory=dict)
    """For each stored item, a function that restores it in the form that its operation returned."""
    left_out: dict[int, Any] = field(default_factory=dict)
    """Shapes of unused items, without values."""
    generators: dict[int, Tensor] = field(default_factory=dict)
    """Random state before each random operation that will be recomputed."""


class _TraceFollower(TorchDispatchMode):
    """Dispatch mode that compares operations with a trace."""

    def __init__(self, plan: BlockPlan, saved: _SavedResults):
        super().__init__()
        self.plan, self.saved, self.number = plan, saved, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        self.number += 1
        operations = self.plan.tape.operations
        if self.number >= len(operations) or operations[self.number] != str(func):
            planned = operations[self.number] if self.number < len(operations) else "the end"
            raise IntegrityError(
                f"operation {self.number} of a block is {str(func)!r}, but its plan has {planned!r} there",
                fix="use memory.recompute, which works on blocks whose operations change from step to step",
            )
        return self.follow(func, args, kwargs, self.plan.tape.owners[self.number])

    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        raise NotImplementedError


class _StoringPass(_TraceFollower):
    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        if item in self.plan.recomputed and _is_random(func):
            self.saved.generators[self.number] = _generator_state(args, kwargs)
        result = func(*args, **kwargs)
        if item is None:
            return result
        if item == self.number and item not in self.plan.recomputed:
            self.saved.results[item] = tree_map_only(Tensor, Tensor.detach, result)
        if item in self.saved.results and self.number == self.plan.tape.items[item].last_write:
            self.store_item(item)
        return result

    def store_item(self, item: int) -> None:
        result = self.saved.results.pop(item)
        if item in self.plan.stored:
            largest = max(tensor.nbytes for tensor in tensors_in(result))
            store = self.plan.stored[item]
            stored = tree_map_only(Tensor, lambda value: _stored(value, store, largest / SMALL), result)
            self.saved.results[item] = stored
        else:
            self.saved.left_out[item] = tree_map_only(Tensor, _TensorShape.like, result)


class _ReplayPass(_TraceFollower):
    def __enter__(self) -> Self:
        if self.number >= 0:
            raise IntegrityError(
                "the backward pass of a planned block runs a second time, but its stored tensors were freed",
                fix="use memory.recompute, which works with retain_graph=True",
            )
        return super().__enter__()

    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        if self.number in self.plan.tape.outside:
            return args[0]
        if item is None:
            return func(*args, **kwargs)
        if item in self.plan.recomputed:
            if self.number in self.saved.generators:
                _set_generator_state(self.saved.generators[self.number], args, kwargs)
            return func(*args, **kwargs)
        if item != self.number:  # a write into a stored or unused item
            return args[0]
        return tree_map(_restored, self.saved.results.pop(item, None) or self.saved.left_out[item])


@dataclass(frozen=True)
class _TensorShape:
    """Shape, strides, dtype and device of a tensor, without values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> Self:
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class _StoredResult:
    give: Callable[[], Tensor]


def _stored(tensor: Tensor, store: Store, small: float) -> _StoredResult:
    return _StoredResult((store if tensor.nbytes > small else keep_tensor)(tensor))


def _restored(value: Any) -> Any:
    if isinstance(value, _StoredResult):
        return value.give().detach()
    if isinstance(value, _TensorShape):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)
    return value


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _device(args: tuple, kwargs: dict) -> torch.device:
    return next((value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), torch.device("cpu"))


def _generator_state(args: tuple, kwargs: dict) -> Tensor:
    device = _device(args, kwargs)
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_generator_state(state: Tensor, args: tuple, kwargs: dict) -> None:
    device = _device(args, kwargs)
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
