"""A block whose saved tensors are each kept, moved, or made again, as decided item by item.

The forward pass stores what was decided to be stored. Before the block's backward pass its operations run again, but of
these only the ones that are needed: what is stored is put in its place, and what nobody needs is left out.
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
"""Takes a tensor over and returns what gives it back."""


def keep_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@dataclass(frozen=True)
class BlockPlan:
    """What happens to the items of a tape: stored in some way, or made again. An item in neither is not needed. Under
    `INPUT` the way of the input, where that does not stay."""

    tape: OpTrace
    stored: Mapping[int, Store]
    again: frozenset[int]

    @property
    def is_plain(self) -> bool:
        """Whether autograd's own way is the plan: everything saved is kept."""
        stay = all(self.stored.get(item.number) is keep_tensor for item in self.tape.items.values() if item.saved)
        return stay and INPUT not in self.stored

    @property
    def is_streamed(self) -> bool:
        """Whether nothing is made again: what was stored elsewhere comes back tensor by tensor."""
        return not self.again and not self.is_plain

    @property
    def is_whole(self) -> bool:
        """Whether all of the block is made again at once: nothing is stored, left out or written beside it."""
        stored = self.stored.keys() - {INPUT}
        return not stored and not self.tape.outside and self.again == self.tape.items.keys()


def run_block_plan(plan: BlockPlan, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Run a block forward by its plan; its backward pass follows the plan too.

    Raises IntegrityError where the block does not run the operations that the plan was made for.
    """
    if plan.is_plain:
        return function(*args, **kwargs)
    if plan.is_streamed:
        with same_casts(), use_activation_store(_StorageStream(plan), SMALLEST):
            return function(*args, **kwargs)
    more: dict[str, Any] = {}
    if not plan.is_whole:  # which needs no operation to be followed
        holder = _HeldTensor()
        more["context_fn"] = lambda: (_StoringPass(plan, holder), _ReplayPass(plan, holder))
    around = use_activation_store(_InputHandle(plan, args), SMALLEST) if INPUT in plan.stored else nullcontext()
    with same_casts(), around:
        return recompute(function, args, kwargs, **more)


def store_large_only(store: Store, size: int) -> Store:
    """A store that keeps what is small beside this size."""
    return lambda tensor: keep_tensor(tensor) if tensor.untyped_storage().nbytes() * SMALL <= size else store(tensor)


class _StorageStream:
    """Hands each storage that a block saves to what was decided for it."""

    def __init__(self, plan: BlockPlan):
        self.plan, self.place = plan, 0

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        handed, place = self.plan.tape.handed, self.place
        self.place += 1
        size = activation.untyped_storage().nbytes()
        if place >= len(handed) or handed[place].bytes != size:
            raise IntegrityError(
                f"a block saves {size:,} bytes as tensor {place} for its backward pass, where others were planned",
                fix="memory.recompute works on blocks that do something else each time",
            )
        owner = handed[place].owner
        store = keep_tensor if owner is None else self.plan.stored.get(owner, keep_tensor)
        return None if store is keep_tensor else store(activation)


class _InputHandle:
    """Hands over the input of a block that runs again, where that was decided."""

    def __init__(self, plan: BlockPlan, args: tuple):
        self.store_input = plan.stored[INPUT]
        self.input = args[0].untyped_storage()._cdata if args and isinstance(args[0], Tensor) else None

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        return self.store_input(activation) if activation.untyped_storage()._cdata == self.input else None


@dataclass
class _HeldTensor:
    results: dict[int, Any] = field(default_factory=dict)
    """What gives back each stored item, in the form in which its operation returned it."""
    left_out: dict[int, Any] = field(default_factory=dict)
    """What an item that is not needed looks like: shapes without values."""
    generators: dict[int, Tensor] = field(default_factory=dict)
    """The state of the random numbers before each operation that draws some and will run again."""


class _TraceFollower(TorchDispatchMode):
    """Counts operations along a tape."""

    def __init__(self, plan: BlockPlan, holder: _HeldTensor):
        super().__init__()
        self.plan, self.held, self.number = plan, holder, -1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        self.number += 1
        operations = self.plan.tape.operations
        if self.number >= len(operations) or operations[self.number] != str(func):
            planned = operations[self.number] if self.number < len(operations) else "the end"
            raise IntegrityError(
                f"a block runs {func} as its operation {self.number}, where {planned} was planned",
                fix="memory.recompute works on blocks that do something else each time",
            )
        return self.follow(func, args, kwargs, self.plan.tape.belongs[self.number])

    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        raise NotImplementedError


class _StoringPass(_TraceFollower):
    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        if item in self.plan.again and _draws(func):
            self.held.generators[self.number] = _generator_state(args, kwargs)
        result = func(*args, **kwargs)
        if item is None:
            return result
        if item == self.number and item not in self.plan.again:
            self.held.results[item] = tree_map_only(Tensor, Tensor.detach, result)
        if item in self.held.results and self.number == self.plan.tape.items[item].last_write:
            self.put_away(item)
        return result

    def put_away(self, item: int) -> None:
        result = self.held.results.pop(item)
        if item in self.plan.stored:
            largest = max(tensor.nbytes for tensor in tensors_in(result))
            store = self.plan.stored[item]
            stored = tree_map_only(Tensor, lambda value: _stored(value, store, largest / SMALL), result)
            self.held.results[item] = stored
        else:
            self.held.left_out[item] = tree_map_only(Tensor, _TensorShape.like, result)


class _ReplayPass(_TraceFollower):
    def __enter__(self) -> Self:
        if self.number >= 0:
            raise IntegrityError(
                "the backward pass of a planned block is gone through a second time, and what it stored is given up",
                fix="memory.recompute works with graphs that are kept",
            )
        return super().__enter__()

    def follow(self, func: Any, args: tuple, kwargs: dict, item: int | None) -> Any:
        if self.number in self.plan.tape.outside:
            return args[0]
        if item is None:
            return func(*args, **kwargs)
        if item in self.plan.again:
            if self.number in self.held.generators:
                _set_generator_state(self.held.generators[self.number], args, kwargs)
            return func(*args, **kwargs)
        if item != self.number:  # a write into what is already there, or not needed
            return args[0]
        return tree_map(_given, self.held.results.pop(item, None) or self.held.left_out[item])


@dataclass(frozen=True)
class _TensorShape:
    """A tensor's place without its values."""

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


def _given(value: Any) -> Any:
    if isinstance(value, _StoredResult):
        return value.give().detach()
    if isinstance(value, _TensorShape):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)
    return value


def _draws(func: Any) -> bool:
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
