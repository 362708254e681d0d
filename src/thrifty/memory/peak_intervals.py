"""Memory of a block over time, if its saved tensors are offloaded and return one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from thrifty.core.errors import ThriftyError
from thrifty.core.module_state import restore_module_state
from thrifty.core.tensor_tracing import StepTrace, gc_disabled, storage_bytes, tensors_in
from thrifty.memory.block_costs import empty_copy, fake_parameters
from thrifty.memory.op_trace import INPUT, OpTrace, same_casts
from thrifty.memory.saved_tensor_hooks import SMALLEST, use_activation_store


@dataclass(frozen=True)
class PeakInterval:
    """Interval in a block's forward or backward pass, between two times at which autograd saves or unpacks a tensor.

    Tensors are identified by their index in `OpTrace.saved_tensors`.
    """

    bytes: int
    """Peak bytes in addition to the input and all saved tensors. Negative while some saved tensors do not exist."""
    here: frozenset[int]
    """Indices of the saved tensors that count as on the device: tensors in use, and tensors that do not exist yet,
    because `bytes` is relative to all saved tensors."""
    next: tuple[int, ...]
    """Indices of saved tensors in transfer order. The first of these tensors that is offloaded is in transfer, and
    therefore also on the device."""


def peak_intervals(
    module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
) -> list[PeakInterval]:
    """Return the intervals of a call of `function` that can determine the peak. Bytes are counted on fake tensors.

    Return [] if the intervals depend on values, or if the call does not save the tensors of its trace. The module is
    unchanged.
    """
    with _disable_current_modes(), gc_disabled(), restore_module_state(module), same_casts():
        try:
            return _decisive(_followed(module, function, args, kwargs, tape))
        except ThriftyError:
            raise
        except Exception:  # a block can raise any exception on fake tensors
            return []


def _followed(
    module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
) -> list[PeakInterval]:
    leaves, form = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    with mode or FakeTensorMode(allow_non_fake_inputs=True), fake_parameters(module) as own:
        inputs = [empty_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # leaf tensors would count as parameters
        computed = [
            a.clone() if isinstance(a, Tensor) and b.grad_fn else a for a, b in zip(inputs, leaves, strict=True)
        ]
        fake_args, fake_kwargs = tree_unflatten(computed, form)
        with _LivenessTrace(*tensors_in((inputs, computed)), *own) as live:
            tracer = _PeakTracer(live, tape)
            with use_activation_store(tracer, SMALLEST):
                results = [value for value in tensors_in(function(*fake_args, **fake_kwargs)) if value.requires_grad]
            tracer.start_backward()
            ones = [torch.ones_like(value) for value in results]
            trained = [tensor for tensor in (*tensors_in(inputs), *own) if tensor.requires_grad]
            torch.autograd.backward(results, ones, inputs=trained)
            tracer.end()
        if tracer.sizes != [each.bytes for each in tape.saved_tensors]:
            return []
        return tracer.intervals(storage_bytes(results))


class _LivenessTrace(StepTrace):
    """Trace that records which of the watched storages are alive at the peak."""

    def __init__(self, *known: Tensor):
        super().__init__(*known)
        self.watched: list[StorageWeakRef] = []
        self.at_peak = frozenset[int]()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.peak
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > before:
            self.at_peak = self.alive()
        return result

    def alive(self) -> frozenset[int]:
        return frozenset(place for place, storage in enumerate(self.watched) if not storage.expired())

    def end_interval(self) -> tuple[int, frozenset[int]]:
        """End the current interval. Return its peak and the storages that are alive at the peak."""
        interval = self.peak, self.at_peak
        self.peak, self.at_peak = self.now, self.alive()
        return interval


class _PeakTracer:
    """Activation store that stores nothing. It records which storages are alive."""

    def __init__(self, live: _LivenessTrace, tape: OpTrace):
        self.live, self.tape = live, tape
        self.sizes: list[int] = []
        self.forth: list[tuple[int, frozenset[int]]] = []
        """For each interval of the forward pass: its peak, and the saved tensors in use at the peak."""
        self.back: list[int] = []
        self.unpacked: list[int] = []

    def store(self, activation: Tensor) -> Callable[[], Tensor]:
        place = len(self.sizes)
        self.forth.append(self.live.end_interval())
        self.sizes.append(activation.untyped_storage().nbytes())
        stays = place >= len(self.tape.saved_tensors) or self.tape.saved_tensors[place].owner in (None, INPUT)
        self.live.watched.append(StorageWeakRef(activation.untyped_storage()))
        if stays:
            return lambda: self.give(place, activation)
        size, stride, dtype, device = activation.size(), activation.stride(), activation.dtype, activation.device
        return lambda: self.give(place, torch.empty_strided(size, stride, dtype=dtype, device=device))

    def give(self, place: int, tensor: Tensor) -> Tensor:
        if place not in self.unpacked:
            self.back.append(self.live.end_interval()[0])
            self.unpacked.append(place)
        return tensor

    def start_backward(self) -> None:
        self.forth.append(self.live.end_interval())

    def end(self) -> None:
        self.back.append(self.live.end_interval()[0])

    def intervals(self, results: int) -> list[PeakInterval]:
        """Return the intervals. The backward pass excludes the bytes of the `results`, because the caller counts
        them.
        """
        saved = self.tape.saved_tensors
        places = range(len(saved))
        moved = [each.bytes if each.owner not in (None, INPUT) else 0 for each in saved]
        stays = self.tape.saved_bytes - sum(moved)
        peaks = []
        for stored, (peak, alive) in enumerate(self.forth):
            here = alive | frozenset(places[stored:]) | self._inputs()
            peaks.append((peak, here, tuple(reversed(places[:stored]))))
        for count, peak in enumerate(self.back):
            gone = frozenset(self.unpacked[:count])
            peaks.append((peak - results, gone, tuple(place for place in reversed(places) if place not in gone)))
        return [
            PeakInterval(peak - stays - sum(moved[place] for place in here), here, following)
            for peak, here, following in peaks
        ]

    def _inputs(self) -> frozenset[int]:
        return frozenset(place for place, each in enumerate(self.tape.saved_tensors) if each.owner == INPUT)


def _decisive(intervals: Sequence[PeakInterval]) -> list[PeakInterval]:
    """Return the intervals that can determine the peak. Drop an interval if another interval always needs as much."""
    peaks: list[PeakInterval] = []
    for each in intervals:
        if not any(other.bytes >= each.bytes and other.here >= each.here for other in peaks):
            peaks = [other for other in peaks if not (each.bytes >= other.bytes and each.here >= other.here)] + [each]
    return peaks
