"""What a block holds, moment by moment, while all that it saves waits elsewhere and comes back tensor by tensor."""

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
from thrifty.core.tensor_tracing import StepTrace, gc_disabled, storage_bytes, tensors_in
from thrifty.memory.block_costs import empty_copy, fake_parameters, restore_module_state
from thrifty.memory.op_trace import INPUT, OpTrace, same_casts
from thrifty.memory.saved_tensor_hooks import SMALLEST, use_activation_store


@dataclass(frozen=True)
class PeakInterval:
    """A stretch of a block's passes between two tensors that are saved or asked for, by their places in
    `OpTrace.handed`."""

    bytes: int
    """At its peak beside the input and all that is saved; below zero where that has not been made yet, or is gone."""
    here: frozenset[int]
    """What is on the device though it waits elsewhere: in use, or not yet made and so counted as saved."""
    next: tuple[int, ...]
    """The first of these that a link carries is underway, and so on the device too."""


def peak_intervals(
    module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
) -> list[PeakInterval]:
    """Of a call of a module's `function`, counted on fake tensors; those that can decide over a peak. [] where shapes
    alone do not tell, or the call does not save what its tape says. Nothing of the module changes."""
    with _disable_current_modes(), gc_disabled(), restore_module_state(module), same_casts():
        try:
            return _decisive(_followed(module, function, args, kwargs, tape))
        except ThriftyError:
            raise
        except Exception:  # what a block does with fake tensors is not for us to know
            return []


def _followed(
    module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
) -> list[PeakInterval]:
    leaves, form = tree_flatten((args, kwargs))
    mode = next((leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)), None)
    with mode or FakeTensorMode(allow_non_fake_inputs=True), fake_parameters(module) as own:
        inputs = [empty_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # a leaf would be taken for a parameter
        computed = [
            a.clone() if isinstance(a, Tensor) and b.grad_fn else a for a, b in zip(inputs, leaves, strict=True)
        ]
        fake_args, fake_kwargs = tree_unflatten(computed, form)
        with _LivenessTrace(*tensors_in((inputs, computed)), *own) as live:
            watching = _PeakTracer(live, tape)
            with use_activation_store(watching, SMALLEST):
                results = [value for value in tensors_in(function(*fake_args, **fake_kwargs)) if value.requires_grad]
            watching.turn_back()
            ones = [torch.ones_like(value) for value in results]
            trained = [tensor for tensor in (*tensors_in(inputs), *own) if tensor.requires_grad]
            torch.autograd.backward(results, ones, inputs=trained)
            watching.end()
        if watching.sizes != [each.bytes for each in tape.handed]:
            return []
        return watching.moments(storage_bytes(results))


class _LivenessTrace(StepTrace):
    """Knows which of some storages are alive at the peak."""

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

    def stretch(self) -> tuple[int, frozenset[int]]:
        """The one that ends now: its peak, and what was alive then."""
        interval = self.peak, self.at_peak
        self.peak, self.at_peak = self.now, self.alive()
        return interval


class _PeakTracer:
    """A keeper that keeps nothing and notes what is alive."""

    def __init__(self, live: _LivenessTrace, tape: OpTrace):
        self.live, self.tape = live, tape
        self.sizes: list[int] = []
        self.forth: list[tuple[int, frozenset[int]]] = []
        """For each stretch of the forward pass its peak, and which of what has been saved was still used there."""
        self.back: list[int] = []
        self.asked: list[int] = []

    def store(self, activation: Tensor) -> Callable[[], Tensor]:
        place = len(self.sizes)
        self.forth.append(self.live.stretch())
        self.sizes.append(activation.untyped_storage().nbytes())
        stays = place >= len(self.tape.handed) or self.tape.handed[place].owner in (None, INPUT)
        self.live.watched.append(StorageWeakRef(activation.untyped_storage()))
        if stays:
            return lambda: self.give(place, activation)
        size, stride, dtype, device = activation.size(), activation.stride(), activation.dtype, activation.device
        return lambda: self.give(place, torch.empty_strided(size, stride, dtype=dtype, device=device))

    def give(self, place: int, tensor: Tensor) -> Tensor:
        if place not in self.asked:
            self.back.append(self.live.stretch()[0])
            self.asked.append(place)
        return tensor

    def turn_back(self) -> None:
        self.forth.append(self.live.stretch())

    def end(self) -> None:
        self.back.append(self.live.stretch()[0])

    def moments(self, beside: int) -> list[PeakInterval]:
        """Of what was alive on the way back so many bytes do not count: the results are there throughout, and are
        counted with whoever is given them."""
        handed = self.tape.handed
        places = range(len(handed))
        moved = [each.bytes if each.owner not in (None, INPUT) else 0 for each in handed]
        stays = self.tape.saved_bytes - sum(moved)
        peaks = []
        for made, (peak, alive) in enumerate(self.forth):
            here = alive | frozenset(places[made:]) | self._inputs()
            peaks.append((peak, here, tuple(reversed(places[:made]))))
        for count, peak in enumerate(self.back):
            gone = frozenset(self.asked[:count])
            peaks.append((peak - beside, gone, tuple(place for place in reversed(places) if place not in gone)))
        return [
            PeakInterval(peak - stays - sum(moved[place] for place in here), here, following)
            for peak, here, following in peaks
        ]

    def _inputs(self) -> frozenset[int]:
        return frozenset(place for place, each in enumerate(self.tape.handed) if each.owner == INPUT)


def _decisive(moments: Sequence[PeakInterval]) -> list[PeakInterval]:
    """Without those that hold no more than another in any case."""
    peaks: list[PeakInterval] = []
    for each in moments:
        if not any(other.bytes >= each.bytes and other.here >= each.here for other in peaks):
            peaks = [other for other in peaks if not (each.bytes >= other.bytes and each.here >= other.here)] + [each]
    return peaks
