"""Hooks for tensors that autograd saves. They pass the activations among these tensors to an activation store."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from thrifty.core.dtensors import dtensor_of_local, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

SMALLEST = 1024
"""Minimum number of elements of a tensor that is passed to a store."""

_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("T", "View", "Transpose", "Permute", "ToCopy", "Slice", "Select", "UnsafeView", "AsStrided", "Alias")
)
"""Autograd nodes whose result is their input in another shape, order or dtype."""


def is_quantizable(tensor: Tensor) -> bool:
    """Return True for floating-point tensors that 8-bit quantization makes smaller. FP8 tensors are excluded."""
    return tensor.is_floating_point() and tensor.itemsize > 1


class ActivationStore(Protocol):
    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        """Store an activation until the backward pass requires it.

        Each activation is passed once, as its whole storage, even if several operations save it or a view of it.
        Returns a function that returns a tensor of the same shape and values, and that can be called several times.
        Returns None to let autograd keep the tensor. The function must not reference the tensor itself.
        """
        ...


@contextmanager
def use_activation_store(keeper: ActivationStore, smallest: int = SMALLEST) -> Iterator[None]:
    """Pass activations that autograd saves inside the `with` block to the store. Parameters, their casts and their
    views are not passed.

    Enclose a forward pass; the backward pass may run later.
    """
    # otherwise an outer torch.compile would trace these hooks
    pack, unpack = torch.compiler.disable(_HookedPass(keeper, smallest).pack), torch.compiler.disable(_unpack)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def base_storage(tensor: Tensor, smallest: int) -> Tensor | None:
    """Return the whole storage of a saved tensor, in the form that a store receives.

    Return None for parameters, for small tensors, and if the storage does not belong to one dense tensor.
    """
    if tensor.numel() < smallest or is_parameter(tensor):
        return None
    whole = tensor if tensor._base is None else tensor._base
    same = whole.dtype == tensor.dtype and whole.numel() * whole.element_size() == tensor.untyped_storage().nbytes()
    return whole if same else None


def is_parameter(tensor: Tensor) -> bool:
    """Return True for a parameter, and for a view or a cast of a parameter."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    reaches_leaf = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    return reaches_leaf or (tensor.is_leaf and tensor.requires_grad)


class _SavedActivation:
    """A storage in an activation store. A restored tensor is cached until its last view was unpacked. Views of one
    storage are usually unpacked together, such as queries, keys and values.
    """

    def __init__(self, whole: Tensor, restore: Callable[[], Tensor]):
        self.size, self.stride, self.restore = whole.size(), whole.stride(), restore
        self.waiting = 0
        self.restored: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        whole = self._restore() if self.restored is None else self.restored
        self.waiting -= 1
        self.restored = whole if self.waiting > 0 else None
        return whole.as_strided(size, stride, offset)

    def _restore(self) -> Tensor:
        whole = self.restore()
        if whole.stride() == self.stride:
            return whole
        return torch.empty_strided(self.size, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)


@dataclass
class _TensorView:
    stored: _SavedActivation
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _LocalView:
    """This rank's part of a sharded tensor."""

    local: Tensor | _TensorView
    mesh: DeviceMesh
    placements: "Sequence[Placement]"
    size: torch.Size
    stride: tuple[int, ...]


class _HookedPass:
    """Tensors saved in one forward pass, by storage."""

    def __init__(self, keeper: ActivationStore, smallest: int):
        self.keeper, self.smallest = keeper, smallest
        # a weak reference also prevents that the address is reused
        self.seen: dict[int, tuple[StorageWeakRef, int, _SavedActivation | None]] = {}

    def pack(self, tensor: Tensor) -> "Tensor | _TensorView | _LocalView":
        if is_dtensor(tensor):
            if tensor.numel() < self.smallest or is_parameter(tensor):
                return tensor
            local = self.pack(tensor.detach().to_local())
            return _LocalView(local, tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())
        whole = base_storage(tensor, self.smallest)
        if whole is None:
            return tensor
        stored = self._stored(whole.detach())
        if stored is None:
            return tensor
        stored.waiting += 1
        return _TensorView(stored, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _stored(self, whole: Tensor) -> _SavedActivation | None:
        storage = StorageWeakRef(whole.untyped_storage())
        known = self.seen.get(storage.cdata)
        if known is not None and known[1] == whole._version:
            return known[2]
        restore = self.keeper.store(whole)
        stored = None if restore is None else _SavedActivation(whole, restore)
        self.seen[storage.cdata] = (storage, whole._version, stored)
        return stored


def _unpack(packed: "Tensor | _TensorView | _LocalView") -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _LocalView):
        return dtensor_of_local(_unpack(packed.local), packed.mesh, packed.placements, packed.size, packed.stride)
    return packed.stored.view(packed.size, packed.stride, packed.offset)
