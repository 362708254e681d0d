"""What a step holds and computes, counted on fake tensors: exact shapes, no memory, no arithmetic."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from thrifty.core.backward import Backward, Outcome
from thrifty.core.batches import Batch
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Around, Objective, Prediction
from thrifty.core.optimizer import TransformOptimizer


def _attention_flops(query: torch.Size, key: torch.Size, *others: Any, **options: Any) -> int:
    """Scores and weighted values, a causal mask not taken off, as torch counts its other attention kernels."""
    b, h, t, k = query
    return 4 * b * h * t * key[2] * k


def _attention_backward_flops(of_output: torch.Size, query: torch.Size, key: torch.Size, *others: Any, **_: Any) -> int:
    return _attention_flops(query, key) // 2 * 5  # the scores again, and two products for each of the two


FLOPS_OF = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention_flops),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(_attention_backward_flops),
}
"""torch's own formulas, and those of kernels that it does not know."""


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


_open_traces: "list[StepTrace]" = []


class StepTrace(TorchDispatchMode):
    """While open, follows every storage that an operation makes until it is freed: bytes alive now and at the peak;
    and adds up the FLOPs of matrix products and attention."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.now, self.peak, self.flops = 0, 0, 0
        self.paused = False
        # storages that were there before (parameters, the batch) are not this step's
        self._alive = {tensor.untyped_storage()._cdata: None for tensor in known}
        self._watches: dict[int, weakref.finalize] = {}

    def __enter__(self) -> Self:
        _open_traces.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _open_traces.remove(self)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.paused:
            return result
        formula = FLOPS_OF.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = None
        self._watches[key] = weakref.finalize(storage, self._forget, key, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self._alive.pop(key, None)
        self._watches.pop(key, None)
        self.now -= size


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


def count_step(
    model: nn.Module, objective: Objective, backward: Backward, batch: Batch, optimizer: TransformOptimizer
) -> Footprint:
    """The footprint of one step of this model on this batch; model and batch may be fake or real.

    Activations are what is alive at the end of the forward pass (of the first micro-batch); temporary is what the
    peak of the backward pass holds beyond activations or gradients. FLOPs are those of matrix products and attention.
    """
    model.train()
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with uncollected(), StepTrace(*known) as live:
        marking = _Marking(objective, live)
        outcome: Outcome = backward(model, marking, batch)
        del outcome
        peak = live.peak
    gradients = sum(tensor_bytes(parameter) for parameter in optimizer.parameters)
    optimizer.zero_grad()
    return Footprint(
        parameters=sum(map(tensor_bytes, model.parameters())),
        gradients=gradients,
        optimizer=sum(tensor_bytes(tensor) for tensors in optimizer.slots.values() for tensor in tensors),
        activations=marking.after_forward,
        temporary=max(peak - max(marking.after_forward, gradients), 0),
        flops=live.flops,
    )
