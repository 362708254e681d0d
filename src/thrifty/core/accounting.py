"""What a step holds and computes, counted on fake tensors: exact shapes, no memory, no arithmetic."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from thrifty.core.backward import Backward, Outcome
from thrifty.core.batches import Batch
from thrifty.core.errors import Refused
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Around, Objective, Prediction
from thrifty.core.operations import FLOPS_OF, call
from thrifty.core.optimizer import TransformOptimizer
from thrifty.core.parameters import is_matrix
from thrifty.core.surgery import find_stacks


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cycle collector, whose moments are nobody's promise: the same count every time."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def settled() -> Iterator[None]:
    """The cycle collector leaves alone what is there before the block. Several counts then take a moment each, where
    going through all that is imported takes tenths of a second."""
    if gc.get_freeze_count():  # somebody outside settled it, and will end it
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def one_thread() -> Iterator[None]:
    """A trace sees what its own thread does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_open_traces: "list[StepTrace]" = []


class StepTrace(TorchDispatchMode):
    """While open, follows every storage that an operation makes until it is freed: bytes alive now and at the peak;
    and adds up the FLOPs of matrix products and attention."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.now, self.peak, self.flops = 0, 0, 0
        self.paused = False
        self.watch: Callable[[int], None] | None = None
        """Told after each operation how many bytes are alive."""
        self._alive: dict[int, int] = {}
        """Bytes of each storage that is alive."""
        self._watches: dict[int, weakref.finalize] = {}
        self.know(*known)

    def know(self, *tensors: Tensor) -> None:
        """Takes note of tensors that were there before (parameters, the batch): their bytes are not the step's."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._alive.setdefault(storage._cdata, storage.nbytes())

    def held_besides(self, *tensors: Tensor) -> int:
        """Bytes alive, known ones included, that are none of these tensors'."""
        own = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(size for key, size in self._alive.items() if key not in own)

    def __enter__(self) -> Self:
        _open_traces.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _open_traces.remove(self)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = call(func, args, kwargs or {})
        if self.paused:
            return result
        formula = FLOPS_OF.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        if not _sums_gradients(func):
            self.peak = max(self.peak, self.now)
            if self.watch is not None:
                self.watch(self.now)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = size
        self._watches[key] = weakref.finalize(storage, self._forget, key, size)
        self.now += size

    def _forget(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        self._watches.pop(key, None)
        self.now -= size


def _sums_gradients(func: Any) -> bool:
    """Whether autograd adds up two gradients of one tensor. It writes over the first, if nobody else holds that, but
    under a dispatch mode takes new memory: the first is freed before the next operation."""
    summing = func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled()
    return summing and torch._C._current_autograd_node() is not None


@contextmanager
def unseen() -> Iterator[None]:
    """What runs inside the block, and leaves nothing behind, is not counted by the traces that are open already."""
    paused = [trace for trace in _open_traces if not trace.paused]
    for trace in paused:
        trace.paused = True
    try:
        yield
    finally:
        for trace in paused:
            trace.paused = False


class _Marking(Around):
    """Another objective that notes how many bytes are alive once the forward pass is over."""

    def __init__(self, inner: Objective, live: StepTrace):
        super().__init__(inner)
        self.live, self.after_forward = live, -1

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        if self.after_forward < 0:  # later micro-batches have the gradients of earlier ones beside them
            self.after_forward = self.live.now
        return losses


class _Passes:
    """While open, follows forward and backward passes through blocks: what those hand on and keep, and the most that is
    alive beside complete gradients."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], live: StepTrace):
        self.blocks, self.live = blocks, live
        self.hidden = self.saved = 0
        """Bytes that a block hands to the next, at most; that all of them keep of their first forward pass."""
        self.peak = self.peak_inside = 0
        """The most at any time; from when the first gradient of a block is complete."""
        self._learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._of_blocks = {parameter for block in blocks for parameter in block.parameters()}
        self._complete: set[nn.Parameter] = set()
        self._begun: set[nn.Module] = set()
        self._ended: set[nn.Module] = set()
        self._aside, self._is_inside = 0, False

    def __enter__(self) -> Self:
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._completed) for parameter in self._learned]
        self._hooks += [block.register_forward_pre_hook(self._begins) for block in self.blocks]
        self._hooks += [block.register_forward_hook(self._ends) for block in self.blocks]
        self.live.watch = self._see
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.watch = None
        for hook in self._hooks:
            hook.remove()

    def _see(self, now: int) -> None:
        self.peak = max(self.peak, now - self._aside)
        if self._is_inside:
            self.peak_inside = max(self.peak_inside, now - self._aside)

    def _completed(self, parameter: nn.Parameter) -> None:
        self._is_inside |= parameter in self._of_blocks
        if parameter not in self._complete and parameter.grad is not None:
            self._complete.add(parameter)
            self._aside += tensor_bytes(parameter.grad)

    def _begins(self, block: nn.Module, args: tuple) -> None:
        self._is_inside = False
        if block not in self._begun:
            self._begun.add(block)
            self.saved -= self.live.now

    def _ends(self, block: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.hidden = max(self.hidden, tensor_bytes(hidden))
        if block not in self._ended:
            self._ended.add(block)
            self.saved += self.live.now


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of all stacks; [] for a model that has none."""
    with suppress(Refused):
        return [block for stack in find_stacks(model).values() for block in stack]
    return []


def block_bytes(blocks: Sequence[nn.Module]) -> list[int]:
    """Bytes of the parameters of each block, those that several share counted with the first."""
    seen: set[nn.Parameter] = set()
    sizes = []
    for block in blocks:
        own = set(block.parameters()) - seen
        sizes.append(sum(map(tensor_bytes, own)))
        seen |= own
    return sizes


def count_step(
    model: nn.Module,
    objective: Objective,
    backward: Backward,
    batch: Batch,
    optimizer: TransformOptimizer,
    built: StepTrace | None = None,
    updates: Sequence[int] = (0,),
) -> Footprint:
    """The footprint of one step of this model on this batch; model and batch may be fake or real.

    Activations are what is alive at the end of the forward pass (of the first micro-batch); temporary is what the
    peak of backward pass and update holds beyond activations or gradients. FLOPs are those of matrix products and
    attention in the forward and the backward pass. A trace that was open while the model and the optimizer were
    `built` knows what else they hold. Of several `updates` the one that holds most counts; one that asks fake tensors
    for values counts up to there.
    """
    model.train()
    state = [*model.parameters(), *(tensor for tensors in optimizer.slots.values() for tensor in tensors)]
    given = [*batch.fields.values(), batch.weight]
    blocks = blocks_of(model)
    with uncollected(), built or StepTrace() as live:
        live.know(*state, *model.buffers(), *given)
        buffers, before = live.held_besides(*state, *given), live.now
        live.peak = before
        marking, passes = _Marking(objective, live), _Passes(model, blocks, live)
        with passes:
            outcome: Outcome = backward(model, marking, batch)
            del outcome
        flops = live.flops
        for optimizer.updates in updates:
            with suppress(DataDependentOutputException, DynamicOutputShapeException):
                optimizer.step()
        activations, peak = marking.after_forward - before, live.peak - before
    gradients = sum(tensor_bytes(parameter) for parameter in optimizer.parameters)
    optimizer.zero_grad()
    parameters = sum(map(tensor_bytes, model.parameters()))
    sizes = block_bytes(blocks)
    return Footprint(
        parameters=parameters,
        outside=parameters - sum(sizes),
        block=max(sizes, default=0),
        vectors=sum(tensor_bytes(p) for name, p in model.named_parameters() if not is_matrix(name, p)),
        hidden=passes.hidden,
        buffers=buffers,
        gradients=gradients,
        optimizer=sum(tensor_bytes(tensor) for tensors in optimizer.slots.values() for tensor in tensors),
        activations=activations,
        saved=min(max(passes.saved, 0), activations),
        passes=max(passes.peak - before, 0),
        inside=max(passes.peak_inside - before, 0),
        temporary=max(peak - max(activations, gradients), 0),
        flops=flops,
    )
