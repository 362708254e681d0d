"""Blocks that a model calls one after the other, as a chain whose forward passes can be made again.

The model keeps its own loop. Each call of a block is watched from outside the module: outside its hooks, what a
compiler made of it and what sharding does around it. What autograd saves inside is dropped, and found again in the
backward pass by making the call once more. A call's input is kept or, where it is the output of the call before it,
made again too.

Which call keeps what is advice: values never depend on it, only memory and time do. So a model may skip blocks, call
one of them twice or change hidden states between two blocks, and still computes the same.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.randomness import GeneratorStates
from thrifty.core.tensor_tracing import tensors_in
from thrifty.core.written_buffers import BufferSnapshot
from thrifty.memory.recomputation import RERUN_FIX
from thrifty.memory.recompute_schedule import RecomputeAction, RecomputeSchedule


class BlockChain:
    """Watches the calls of these blocks and lets them keep what `schedule` says; None leaves them alone. It may be
    replaced between two forward passes; a backward pass follows the schedule of its forward pass."""

    def __init__(self, blocks: Sequence[nn.Module], schedule: RecomputeSchedule | None):
        self.schedule = schedule
        self.instead: Callable[..., Any] | None = None
        """Answers calls in place of the blocks, while their costs are looked up."""
        self.places: dict[nn.Module, list[int]] = {}
        for place, block in enumerate(blocks):
            self.places.setdefault(block, []).append(place)
        self._place = -1
        self._latest: weakref.ref[BlockCall] | None = None
        for block in self.places:
            wrap_call(block, self.call)

    def call(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        schedule = self.schedule if torch.is_grad_enabled() else None
        if self.instead is None and schedule is None:
            return inner(*args, **kwargs)
        refuse_writable(module, (args, kwargs))
        if self.instead is not None:
            return self.instead(module, inner, *args, **kwargs)
        assert schedule is not None
        places = self.places[module]  # several where one block is used several times
        place = self._place = next((each for each in places if each > self._place), places[0])
        before = self._latest() if self._latest else None
        do = schedule.first.get(place, RecomputeAction.KEEP_INPUT)
        if do is RecomputeAction.KEEP_ALL:
            self._latest = None
            return inner(*args, **kwargs)
        buffers = BufferSnapshot(module)
        call = BlockCall(inner, place, schedule, args, kwargs, before if do is RecomputeAction.PASS else None, buffers)
        result = call.make(*args, **kwargs)
        self._latest = weakref.ref(call)
        return result


class BlockCall:
    """One call of a block, held by what stands in the autograd graph for the tensors that it did not keep."""

    def __init__(
        self,
        inner: Callable[..., Any],
        place: int,
        schedule: RecomputeSchedule,
        args: tuple,
        kwargs: dict,
        before: "BlockCall | None",
        buffers: BufferSnapshot,
    ):
        self.inner, self.place, self.schedule, self.buffers = inner, place, schedule, buffers
        leaves, self.form = tree_flatten((args, kwargs))
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self.constants = [None if number in tensors else leaf for number, leaf in enumerate(leaves)]
        self.trained = {number for number, tensor in tensors.items() if tensor.requires_grad}
        self.links = before.found_in(tensors) if before else {}
        """Leaves of the input that are leaves of the output of the call before."""
        self.before = before if self.links else None
        own = {number: tensor for number, tensor in tensors.items() if number not in self.links}
        self.own = list(own)
        self.kept = _keep(own.values())
        self.relay: list[Tensor] | None = None
        """What the links stand for, kept on the way through when this call was made again."""
        self.surroundings = CallContext(tensors.values())
        self.outputs: list[weakref.ref] = []
        self.saves: list[tuple[torch.Size, torch.dtype]] = []
        self.found: list[Tensor | None] = []
        """What `saves` describes, once it has been made again and until autograd has taken it."""

    def make(self, *args: Any, **kwargs: Any) -> Any:
        """The first time: its result, with the tensors that autograd would save left out."""
        with saved_tensors_hooks(self._leave_out, _give):
            result = self.inner(*args, **kwargs)
        self.buffers.forget_constant()
        self.outputs = [weakref.ref(tensor) for tensor in tensors_in(result)]
        return result

    def _leave_out(self, tensor: Tensor) -> tuple["BlockCall", int]:
        self.saves.append((tensor.shape, tensor.dtype))
        return self, len(self.saves) - 1

    def found_in(self, tensors: Mapping[int, Tensor]) -> dict[int, int]:
        places = {id(output): place for place, ref in enumerate(self.outputs) if (output := ref()) is not None}
        return {number: places[id(tensor)] for number, tensor in tensors.items() if id(tensor) in places}

    def give(self, index: int) -> Tensor:
        """What autograd did not save, once."""
        if not self.found or self.found[index] is None:
            self._recover()
        tensor, self.found[index] = self.found[index], None
        assert tensor is not None
        return tensor

    def _recover(self) -> None:
        """Make again the calls from the nearest one whose input is there up to this one."""
        way = [self]
        while way[-1].before is not None and way[-1].relay is None:
            way.append(way[-1].before)
        advice = self.schedule.again.get(self.place, {})
        linked = way[-1].relay or []
        for call, following in zip(reversed(way), [*reversed(way[:-1]), None], strict=True):
            do = RecomputeAction.KEEP_ALL if call is self else advice.get(call.place, RecomputeAction.PASS)
            if do is RecomputeAction.KEEP_INPUT:
                call.relay = linked
            outputs = call.again(linked, do is RecomputeAction.KEEP_ALL, stop=call is self)
            linked = [outputs[place] for place in following.links.values()] if following else []
        self.relay = None

    def again(self, linked: Sequence[Tensor], keep: bool, stop: bool) -> list[Tensor]:
        """Make the call again and return its output. With `keep`, what autograd saves is `found`; with `stop`, nothing
        is computed that only the output needs, and there is none."""
        tensors: list[Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            if keep:
                tensors.append(tensor.detach())
                if stop and len(tensors) == len(self.saves):
                    raise _StopRecompute

        outputs: list[Tensor] = []
        around = self.surroundings.restored(), self.buffers.restored(), saved_tensors_hooks(pack, _gone)
        with around[0], around[1], around[2], suppress(_StopRecompute):
            result = self._call(linked)
            outputs = [tensor.detach() for tensor in tensors_in(result)]
        if keep:
            self._check([(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None])
            self.found = tensors
        return outputs

    def _call(self, linked: Sequence[Tensor]) -> Any:
        leaves = list(self.constants)
        for number, tensor in (*zip(self.own, self.kept(), strict=True), *zip(self.links, linked, strict=True)):
            leaves[number] = tensor.detach().requires_grad_(number in self.trained)
        args, kwargs = tree_unflatten(leaves, self.form)
        return self.inner(*args, **kwargs)

    def _check(self, saves: list[tuple[torch.Size, torch.dtype]]) -> None:
        if saves != self.saves:
            raise IntegrityError(
                f"block {self.place} saved {len(self.saves)} tensors for its backward pass, and {len(saves)} or others "
                "when it ran again",
                fix=RERUN_FIX,
            )


def refuse_writable(module: nn.Module, inputs: Any) -> None:
    """Raises RefusedError for an argument that a forward pass writes into, such as a cache of keys and values."""
    for leaf in tree_leaves(inputs):
        if not isinstance(leaf, Tensor) and callable(getattr(leaf, "update", None)):
            raise RefusedError(
                f"{type(module).__name__} is given a {type(leaf).__name__} to write into, and cannot run twice with it",
                fix="train without a cache of keys and values: use_cache=False in the model's configuration",
            )


class CallContext:
    """Generators and autocast at a call: what its result depends on beside its arguments."""

    def __init__(self, tensors: Iterable[Tensor]):
        devices = {tensor.device for tensor in tensors}
        self.generators = GeneratorStates(devices)
        self.autocasts = [
            partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)} - {"meta"}
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.generators.restored())
            for autocast in self.autocasts:
                stack.enter_context(autocast())
            stack.enter_context(torch.enable_grad())
            yield


class _StopRecompute(Exception):
    """All that was to be saved has been seen."""


class _KeptOutput(torch.autograd.Function):
    """A node that saves tensors and nothing else, so that saved-tensor hooks around the model see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _keep(tensors: Iterable[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    # detached: the graph before them would hold this call, and this call the graph
    kept = _KeptOutput.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors))
    return lambda: kept.grad_fn.saved_tensors  # a node whose result is gone may forget what it saved


def _give(left_out: tuple[BlockCall, int]) -> Tensor:
    call, index = left_out
    return call.give(index)


def _gone(packed: None) -> Tensor:
    raise AssertionError("there is no backward pass through a call that is made again")


@cache
def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.watcher(self, partial(kind.__call__, self), *args, **kwargs)

    names = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def wrap_call(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Let every call of a module be `wrapper(module, inner, *args, **kwargs)`, `inner` being what it did before, with
    all of its hooks, compiled or not. A wrapped forward is inside of those; this is outside."""
    module.watcher = wrapper  # type: ignore[assignment]
    module.__class__ = _watched(type(module))
