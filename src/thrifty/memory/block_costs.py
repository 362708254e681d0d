"""Cost of one block call without running it: bytes and FLOPs are counted on fake tensors."""

from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from thrifty.core.errors import ThriftyError
from thrifty.core.module_state import restore_module_state
from thrifty.core.tensor_tracing import StepTrace, fillable, gc_disabled, storage_bytes, tensors_in
from thrifty.memory.call_signature import CallSignature
from thrifty.memory.recompute_schedule import ChainStageCost

WORTH_OF_A_BYTE = 30
"""Number of FLOPs of a large matmul in the time to write one byte of a result and read the inputs of that byte.

The ratio is 10 to 100 on current processors. It matters only if blocks differ.
"""


class CostTrace(StepTrace):
    """A trace that also counts costs: FLOPs, plus bytes of new results converted to FLOPs."""

    written = 0

    def _see(self, storage: torch.UntypedStorage, args: tuple) -> None:
        self.written += 0 if storage._cdata in self._alive else storage.nbytes()
        self._follow(storage, storage.nbytes())

    @property
    def cost(self) -> float:
        return self.flops + WORTH_OF_A_BYTE * self.written


def counted_stage(module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> ChainStageCost | None:
    """Return the counted cost of a call, or None if the cost depends on values. The module is
    unchanged."""
    with _disable_current_modes(), gc_disabled(), restore_module_state(module):
        try:
            return block_cost(module, forward, args, kwargs)[0]
        except ThriftyError:
            raise
        except Exception:  # a block can raise any exception on fake tensors
            return None


def block_cost(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict,
    known: MutableMapping[Hashable, ChainStageCost] | None = None,
) -> tuple[ChainStageCost, Any]:
    """Return the counted cost of a call of a module's `forward`, and zeros in the shape of its result.

    If the result contains an argument, that argument itself is returned, not zeros. If `known` contains a call with the
    same operations, its cost is used. The module's own hooks do not run, because sharding hooks would gather parameters
    that are fake here.
    """
    leaves, form = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    # tensors that a technique attached to the block are not fake
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, fake_parameters(module) as own:
        inputs = [empty_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def call() -> Any:  # with new containers at each call, because a block may modify them
            fake_args, fake_kwargs = tree_unflatten(inputs, form)
            return forward(*fake_args, **fake_kwargs)

        cost, result = _traced(call, tensors_in(inputs), own, {} if known is None else known)
    real = {id(fake): leaf for fake, leaf in zip(inputs, leaves, strict=True) if isinstance(fake, Tensor)}
    return cost, tree_map_only(Tensor, lambda leaf: real[id(leaf)] if id(leaf) in real else _zeros(leaf), result)


def _traced(
    call: Callable[[], Any],
    inputs: Sequence[Tensor],
    own: Sequence[Tensor],
    known: MutableMapping[Hashable, ChainStageCost],
) -> tuple[ChainStageCost, Any]:
    with CallSignature(*inputs, *own) as passing, saved_tensors_hooks(passing.note_saved, lambda packed: packed):
        result = call()
        passing_bytes = passing.peak - passing.now
    kind = passing.kind(result)
    if kind not in known:
        del result
        known[kind], result = _counted(call, inputs, own, passing_bytes)
    return known[kind], result


def _counted(
    call: Callable[[], Any], inputs: Sequence[Tensor], own: Sequence[Tensor], passing: int
) -> tuple[ChainStageCost, Any]:
    stopped = 0.0

    def note(tensor: Tensor) -> Tensor:
        nonlocal stopped
        stopped = work.cost
        return tensor

    with CostTrace(*inputs, *own) as work:
        with saved_tensors_hooks(note, lambda packed: packed):
            result = call()
        forward, saved, peak = work.cost, work.now, work.peak
        returning = _returning_bytes(work, result, inputs, own)
    outputs = tensors_in(result)
    handed_on = storage_bytes(output for output in outputs if any(output is tensor for tensor in inputs))
    cost = ChainStageCost(
        forward=forward,
        backward=work.cost - forward,
        output=storage_bytes(outputs),
        saved=saved + handed_on,
        passing=passing,
        keeping=peak - saved,
        returning=returning,
        stopped=stopped,
    )
    return cost, result


def _returning_bytes(work: CostTrace, result: Any, inputs: Sequence[Tensor], own: Sequence[Tensor]) -> int:
    """Return the peak bytes of a backward pass. Saved tensors and the gradients of output and input do not count."""
    ends = [output for output in tensors_in(result) if output.grad_fn is not None]
    if not ends:
        return 0
    gradients = [torch.empty_like(end) for end in ends]
    work.peak = started = work.now
    torch.autograd.backward(ends, gradients, inputs=[tensor for tensor in (*inputs, *own) if tensor.requires_grad])
    input_gradients = storage_bytes(tensor.grad for tensor in inputs if tensor.grad is not None)
    return max(work.peak - started - input_gradients, 0)


@contextmanager
def fake_parameters(module: nn.Module) -> Iterator[list[Tensor]]:
    """Replace parameters and buffers by fake tensors inside the `with` block, and yield the fake tensors.

    Sharded tensors become whole tensors. Gradients of the fake tensors are dropped.
    """
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, tensor.requires_grad)
            if tensor.requires_grad:
                copied.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
            fakes[id(tensor)] = copied
        return fakes[id(tensor)]

    for each, parameters, buffers in before:
        each._parameters.update({name: fake(tensor) for name, tensor in parameters.items()})
        each._buffers.update({name: fake(tensor) for name, tensor in buffers.items()})
    try:
        yield list(fakes.values())
    finally:
        for each, parameters, buffers in before:
            each._parameters.update(parameters)
            each._buffers.update(buffers)


def in_seconds(cost: ChainStageCost, forward: float) -> ChainStageCost:
    """Return a counted cost, scaled so that its forward time is the measured `forward`. Ratios of times are
    unchanged."""
    rate = forward / cost.forward if cost.forward else 0.0
    stopped = None if cost.stopped is None else rate * cost.stopped
    return replace(cost, forward=forward, backward=rate * cost.backward, stopped=stopped)


def empty_copy(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


def _zeros(tensor: Tensor) -> Tensor:
    zeros = empty_copy(tensor.detach())
    fillable(zeros).zero_()
    return zeros.requires_grad_(tensor.requires_grad)
