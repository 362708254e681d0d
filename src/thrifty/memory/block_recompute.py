"""Recomputation of the blocks of a model, which calls them one after the other as a chain.

The model keeps its own loop over blocks. Each block call is wrapped outside of the module's hooks, compiled code and
sharding. Tensors that autograd would save inside the call are dropped. The backward pass repeats the call to recompute
them. The input of a call is kept, or recomputed if it is the output of the previous call.

A schedule decides what each call keeps. The schedule changes only memory and time, never values. A model may skip
blocks, call a block twice, or change hidden states between blocks; the result stays the same.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
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
from thrifty.memory.recomputation import RERUN_FIX, without_caches
from thrifty.memory.recompute_schedule import RecomputeAction, RecomputeSchedule


class BlockChain:
    """A chain of wrapped blocks that keep the tensors that `schedule` selects. Without a schedule, nothing is
    recomputed.

    The schedule may change between forward passes. A backward pass follows the schedule of its forward pass.
    """

    def __init__(self, blocks: Sequence[nn.Module], schedule: RecomputeSchedule | None):
        self.schedule = schedule
        self.replacement: Callable[..., Any] | None = None
        """Function that replaces block calls while costs are measured."""
        self.places: dict[nn.Module, list[int]] = {}
        for place, block in enumerate(blocks):
            self.places.setdefault(block, []).append(place)
        self._place = -1
        self._latest: weakref.ref[BlockCall] | None = None
        for block in self.places:
            wrap_call(block, self.call)

    def call(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        schedule = self.schedule if torch.is_grad_enabled() else None
        if self.replacement is None and schedule is None:
            return inner(*args, **kwargs)
        args, kwargs = without_caches(args, module), without_caches(kwargs, module)
        refuse_writable(module, (args, kwargs))
        if self.replacement is not None:
            return self.replacement(module, inner, *args, **kwargs)
        assert schedule is not None
        places = self.places[module]  # several places if the model calls the block several times
        place = self._place = next((each for each in places if each > self._place), places[0])
        before = self._latest() if self._latest else None
        do = schedule.first.get(place, RecomputeAction.KEEP_INPUT)
        if do is RecomputeAction.KEEP_ALL:
            self._latest = None
            return inner(*args, **kwargs)
        buffers = BufferSnapshot(module)
        call = BlockCall(inner, place, schedule, args, kwargs, before if do is RecomputeAction.PASS else None, buffers)
        result = call.run(*args, **kwargs)
        self._latest = weakref.ref(call)
        return result


class BlockCall:
    """One block call. The autograd graph references it instead of the dropped tensors."""

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
        self.links = before.outputs_in(tensors) if before else {}
        """Input tensors that are outputs of the previous call: input index → output index."""
        self.before = before if self.links else None
        own = {number: tensor for number, tensor in tensors.items() if number not in self.links}
        self.own = list(own)
        self.saved_inputs = _keep(own.values())
        self.relay: list[Tensor] | None = None
        """Values of the linked inputs. They are kept if this call was recomputed in order to recompute a later call."""
        self.context = CallContext(tensors.values())
        self.outputs: list[tuple[weakref.ref, int]] = []
        """Outputs, each with its number of in-place writes when the call returned it."""
        self.saves: list[tuple[torch.Size, torch.dtype]] = []
        self.recomputed: list[Tensor | None] = []
        """The tensors that `saves` describes, from their recomputation until autograd uses them."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call for the first time and return its result. The tensors that autograd would save are dropped."""
        with saved_tensors_hooks(self._leave_out, _unpack):
            result = self.inner(*args, **kwargs)
        self.buffers.forget_constant()
        self.outputs = [(weakref.ref(tensor), tensor._version) for tensor in tensors_in(result)]
        return result

    def _leave_out(self, tensor: Tensor) -> tuple["BlockCall", int]:
        self.saves.append((tensor.shape, tensor.dtype))
        return self, len(self.saves) - 1

    def outputs_in(self, tensors: Mapping[int, Tensor]) -> dict[int, int]:
        """Return the index of each tensor among the outputs. Outputs that were changed in place are left out."""
        places = {
            id(output): place
            for place, (ref, version) in enumerate(self.outputs)
            if (output := ref()) is not None and output._version == version
        }
        return {number: places[id(tensor)] for number, tensor in tensors.items() if id(tensor) in places}

    def saved_tensor(self, index: int) -> Tensor:
        """Return a tensor that autograd did not save. Each tensor can be returned once."""
        if not self.recomputed or self.recomputed[index] is None:
            self._recover()
        tensor, self.recomputed[index] = self.recomputed[index], None
        assert tensor is not None
        return tensor

    def _recover(self) -> None:
        """Recompute calls, from the nearest earlier call with an available input up to this call."""
        path = [self]
        while path[-1].before is not None and path[-1].relay is None:
            path.append(path[-1].before)
        advice = self.schedule.again.get(self.place, {})
        linked = path[-1].relay or []
        for call, following in zip(reversed(path), [*reversed(path[:-1]), None], strict=True):
            do = RecomputeAction.KEEP_ALL if call is self else advice.get(call.place, RecomputeAction.PASS)
            if do is RecomputeAction.KEEP_INPUT:
                call.relay = linked
            outputs = call.rerun(linked, do is RecomputeAction.KEEP_ALL, stop=call is self)
            linked = [outputs[place] for place in following.links.values()] if following else []
        self.relay = None

    def rerun(self, linked: Sequence[Tensor], keep: bool, stop: bool) -> list[Tensor]:
        """Repeat the call and return its output. With `keep`, tensors that autograd saves are stored in `recomputed`.
        With `stop`, the call ends at the last saved tensor and returns no output.
        """
        tensors: list[Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            if keep:
                tensors.append(tensor.detach())
                if stop and len(tensors) == len(self.saves):
                    raise _StopRecompute

        outputs: list[Tensor] = []
        contexts = self.context.restored(), self.buffers.restored(), saved_tensors_hooks(pack, _refuse_unpack)
        with contexts[0], contexts[1], contexts[2], suppress(_StopRecompute):
            result = self.context.variables.run(self._call, linked)
            outputs = [tensor.detach() for tensor in tensors_in(result)]
        if keep:
            self._check([(tensor.shape, tensor.dtype) for tensor in tensors if tensor is not None])
            self.recomputed = tensors
        return outputs

    def _call(self, linked: Sequence[Tensor]) -> Any:
        leaves = list(self.constants)
        for number, tensor in (*zip(self.own, self.saved_inputs(), strict=True), *zip(self.links, linked, strict=True)):
            leaves[number] = tensor.detach().requires_grad_(number in self.trained)
        args, kwargs = tree_unflatten(leaves, self.form)
        return self.inner(*args, **kwargs)

    def _check(self, saves: list[tuple[torch.Size, torch.dtype]]) -> None:
        if saves != self.saves:
            raise IntegrityError(
                f"block {self.place} saved {len(self.saves)} tensors in its forward pass, but a different set of "
                f"{len(saves)} tensors when it was recomputed",
                fix=RERUN_FIX,
            )


def refuse_writable(module: nn.Module, inputs: Any) -> None:
    """Raise RefusedError if an argument is written by the forward pass, such as a key-value cache."""
    for leaf in tree_leaves(inputs):
        if not isinstance(leaf, Tensor) and callable(getattr(leaf, "update", None)):
            raise RefusedError(
                f"{type(module).__name__} cannot be recomputed: it writes into its argument of type "
                f"{type(leaf).__name__!r}",
                fix="train without a key-value cache: use_cache=False in the model's configuration",
            )


class CallContext:
    """State that a call depends on in addition to its arguments: context variables, random generators and autocast."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.variables = copy_context()
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
    """Signal that all tensors to save have been recomputed."""


class _KeptOutput(torch.autograd.Function):
    """Autograd node that only saves tensors, so that outer saved-tensor hooks receive them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _keep(tensors: Iterable[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    # detached: otherwise the graph and this call reference each other
    kept = _KeptOutput.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors))
    return lambda: kept.grad_fn.saved_tensors  # keeps the result alive: otherwise the node may free its tensors


def _unpack(left_out: tuple[BlockCall, int]) -> Tensor:
    call, index = left_out
    return call.saved_tensor(index)


def _refuse_unpack(packed: None) -> Tensor:
    raise AssertionError("a recomputed call has no backward pass of its own")


@cache
def _wrapped_type(kind: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call_wrapper(self, partial(kind.__call__, self), *args, **kwargs)

    names = {"__call__": __call__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)


def wrap_call(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Replace every call of a module by `wrapper(module, inner, *args, **kwargs)`. `inner` is the original call with
    all hooks, compiled or not. Unlike a wrapped `forward`, the wrapper runs outside of the hooks.
    """
    module.call_wrapper = wrapper  # type: ignore[assignment]
    module.__class__ = _wrapped_type(type(module))
