"""What the blocks of a chain cost, found out without running any: bytes and FLOPs are counted on fake tensors.

The model's own forward pass runs once, unseen, and its blocks are answered for: each call is traced forward and
backward on fake copies of its arguments and parameters, and zeros of the right shape go on to the next.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from thrifty.core.accounting import StepTrace, uncollected
from thrifty.core.activations.chain_calls import Chain
from thrifty.core.activations.chains import ChainCost, StageCost
from thrifty.core.errors import Refused, ThriftyError
from thrifty.core.ranks import mean_over_ranks

WORTH_OF_A_BYTE = 30
"""FLOPs of a well-filled product in the time in which a byte of a result is written and what it is made of is read: 10
to 100 on today's processors. It matters only where blocks differ."""


class Work(StepTrace):
    """Counts what operations cost, too: FLOPs, and bytes of new results at their worth in FLOPs."""

    written = 0

    def _see(self, storage: torch.UntypedStorage) -> None:
        self.written += 0 if storage._cdata in self._alive else storage.nbytes()
        super()._see(storage)

    @property
    def cost(self) -> float:
        return self.flops + WORTH_OF_A_BYTE * self.written


class Survey:
    """The calls of one forward pass, in order."""

    def __init__(self, timed: bool):
        self.timed = timed
        self.stages: list[StageCost] = []
        self.given: dict[int, Tensor] = {}
        """By storage, arguments that do not come from the call before."""
        self.outputs: list[Tensor] = []

    def call(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = _tensors((args, kwargs))
        own = [tensor for tensor in tensors if not any(tensor is output for output in self.outputs)]
        self.given |= {tensor.untyped_storage()._cdata: tensor for tensor in own}
        try:
            cost, result = block_cost(module, args, kwargs)
        except ThriftyError:
            raise
        except Exception as error:  # what a block does with fake tensors is not for us to know
            why = str(error).partition("\n")[0] or type(error).__name__
            raise Refused(
                f"what {type(module).__name__} costs cannot be counted by shapes alone: {why}",
                fix="use memory.recompute or memory.activation_budget, which run it",
            ) from error
        if self.timed and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            cost = in_seconds(cost, forward_seconds(inner, args, kwargs))
        self.stages.append(cost)
        self.outputs = _tensors(result)
        return result

    def cost(self) -> ChainCost:
        return ChainCost(_storage_bytes(self.given.values()), tuple(self.stages))


def survey(
    model: nn.Module, chain: Chain, forward: Callable[..., Any], args: tuple, kwargs: dict, timed: bool = False
) -> ChainCost:
    """Costs of the chain's blocks in `forward(*args, **kwargs)`, a forward pass of the model: counted, or `timed` where
    tensors are real. Nothing of the model, of its state or of the random numbers changes."""
    found = Survey(timed)
    fakes = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, FakeTensor)]
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(uncollected())
        stack.enter_context(torch.random.fork_rng(list(devices)))
        stack.enter_context(_untouched(model))
        # this pass has no backward pass: whoever keeps activations of the real one must not see what it saves
        stack.enter_context(saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
        if fakes:
            stack.enter_context(fakes[0].fake_mode)
        chain.instead = found.call
        try:
            forward(*args, **kwargs)
        finally:
            chain.instead = None
    return found.cost()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Undo what a forward pass leaves in modules: buffers and attributes."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            _replace_entries(module.__dict__, attributes)
            _replace_entries(module._buffers, buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _replace_entries(old: dict, new: dict) -> None:
    old.clear()
    old.update(new)


def block_cost(module: nn.Module, args: tuple, kwargs: dict) -> tuple[StageCost, Any]:
    """What a call costs, counted, and zeros of the shape of its result; where that hands an argument on, the argument.

    The module's own hooks are left out: those of sharding would gather parameters that the fake ones stand for.
    """
    leaves, form = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    # what a technique gave the block beside its own parameters is real
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _faked(module) as own:
        given = [_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def call() -> Any:  # with containers of its own each time: a block may put something into them
            fake_args, fake_kwargs = tree_unflatten(given, form)
            return module.forward(*fake_args, **fake_kwargs)

        cost, result = _traced(call, _tensors(given), own)
    real = {id(fake): leaf for fake, leaf in zip(given, leaves, strict=True) if isinstance(fake, Tensor)}
    return cost, tree_map(lambda leaf: real[id(leaf)] if id(leaf) in real else _zeros(leaf), result)


def _traced(call: Callable[[], Any], given: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[StageCost, Any]:
    with Work(*given, *own) as passing, saved_tensors_hooks(lambda tensor: None, lambda packed: packed):
        result = call()
        passing_bytes = passing.peak - passing.now
        del result
    stopped = 0.0

    def note(tensor: Tensor) -> Tensor:
        nonlocal stopped
        stopped = work.cost
        return tensor

    with Work(*given, *own) as work:
        with saved_tensors_hooks(note, lambda packed: packed):
            result = call()
        forward, saved, peak = work.cost, work.now, work.peak
        returning = _returning_bytes(work, result, given, own)
    outputs = _tensors(result)
    handed_on = _storage_bytes(output for output in outputs if any(output is tensor for tensor in given))
    cost = StageCost(
        forward=forward,
        backward=work.cost - forward,
        output=_storage_bytes(outputs),
        saved=saved + handed_on,
        passing=passing_bytes,
        keeping=peak - saved,
        returning=returning,
        stopped=stopped,
    )
    return cost, result


def _returning_bytes(work: Work, result: Any, given: Sequence[Tensor], own: Sequence[Tensor]) -> int:
    """What a backward pass needs at its peak, beside what is saved and the gradients of output and input."""
    ends = [output for output in _tensors(result) if output.grad_fn is not None]
    if not ends:
        return 0
    gradients = [torch.empty_like(end) for end in ends]
    work.peak = started = work.now
    trained = [tensor for tensor in (*given, *own) if tensor.requires_grad]
    torch.autograd.backward(ends, gradients, inputs=trained)
    of_input = _storage_bytes(tensor.grad for tensor in given if tensor.grad is not None)
    return max(work.peak - started - of_input, 0)


@contextmanager
def _faked(module: nn.Module) -> Iterator[list[Tensor]]:
    """Fake parameters and buffers, whole where the real ones are divided over ranks; their gradients are dropped."""
    before = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in fakes:
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            if tensor.requires_grad:
                made.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
            fakes[id(tensor)] = made
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


def in_seconds(cost: StageCost, forward: float) -> StageCost:
    """A counted cost on the scale of one measured time; the parts keep their ratios."""
    rate = forward / cost.forward if cost.forward else 0.0
    stopped = None if cost.stopped is None else rate * cost.stopped
    return replace(cost, forward=forward, backward=rate * cost.backward, stopped=stopped)


def forward_seconds(call: Callable[..., Any], args: tuple, kwargs: dict, times: int = 3) -> float:
    """The least of some times after one that is not counted; of several ranks the mean, so that all decide alike."""
    seconds = []
    with saved_tensors_hooks(lambda tensor: None, lambda packed: packed):
        for _ in range(1 + times):
            began = time.perf_counter()
            call(*args, **kwargs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return float(mean_over_ranks(torch.tensor(min(seconds[1:]), device=_tensors((args, kwargs))[0].device)))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in list(tensors)}.values())


def _like(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.requires_grad_(tensor.requires_grad)


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    zeros = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
    return zeros.requires_grad_(value.requires_grad)
