"""What autograd saves for the backward pass: which of it are activations, and who holds those in the meantime."""

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
"""Tensors of fewer numbers are left where they are."""

_SAME_VALUES = frozenset(
    f"{name}Backward0"
    for name in ("T", "View", "Transpose", "Permute", "ToCopy", "Slice", "Select", "UnsafeView", "AsStrided", "Alias")
)
"""Nodes whose result is their input in another shape, order or number format."""


def is_quantizable(tensor: Tensor) -> bool:
    """Whether it is of floating-point numbers that codes of 8 bits make smaller: not those of FP8, codes already."""
    return tensor.is_floating_point() and tensor.itemsize > 1


class ActivationStore(Protocol):
    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        """Take an activation over until the backward pass asks for it.

        It comes once, as the whole of its storage, however many operations save it or a view of it. Returns what gives
        a tensor of its shape and values back, called as often as it is needed; None leaves it where it is. Whoever
        returns a function must not hold on to the tensor itself.
        """
        ...


@contextmanager
def use_activation_store(keeper: ActivationStore, smallest: int = SMALLEST) -> Iterator[None]:
    """Activations that are saved inside the block are handed to the keeper; parameters, and casts and views of them,
    are not. Open it around a forward pass; the backward pass may come later."""
    # a compiler that is at work around them would trace into them
    pack, unpack = torch.compiler.disable(_HookedPass(keeper, smallest).pack), torch.compiler.disable(_unpack)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def base_storage(tensor: Tensor, smallest: int) -> Tensor | None:
    """What a keeper is asked to take over where this tensor is saved: the whole of its storage. None where it is not
    asked: for parameters, for small tensors, and where the storage is not that of one tensor."""
    if tensor.numel() < smallest or is_parameter(tensor):
        return None
    whole = tensor if tensor._base is None else tensor._base
    same = whole.dtype == tensor.dtype and whole.numel() * whole.element_size() == tensor.untyped_storage().nbytes()
    return whole if same else None


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or one seen in another shape, order or number format."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    of_leaf = node is not None and node.name() == "torch::autograd::AccumulateGrad"
    return of_leaf or (tensor.is_leaf and tensor.requires_grad)


class _SavedActivation:
    """One storage in a keeper's hands. What is given back stays until the last of those who packed it has asked: they
    are neighbours, such as queries, keys and values in one."""

    def __init__(self, whole: Tensor, give: Callable[[], Tensor]):
        self.size, self.stride, self.give = whole.size(), whole.stride(), give
        self.waiting = 0
        self.given: Tensor | None = None

    def view(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        whole = self._give_again() if self.given is None else self.given
        self.waiting -= 1
        self.given = whole if self.waiting > 0 else None
        return whole.as_strided(size, stride, offset)

    def _give_again(self) -> Tensor:
        whole = self.give()
        if whole.stride() == self.stride:
            return whole
        return torch.empty_strided(self.size, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)


@dataclass
class _TensorView:
    kept: _SavedActivation
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _LocalView:
    """What this rank holds of a divided tensor."""

    held: Tensor | _TensorView
    mesh: DeviceMesh
    placements: "Sequence[Placement]"
    size: torch.Size
    stride: tuple[int, ...]


class _HookedPass:
    """The tensors saved in one forward pass, by storage."""

    def __init__(self, keeper: ActivationStore, smallest: int):
        self.keeper, self.smallest = keeper, smallest
        # a weak reference also keeps the address from being used again
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
        kept = self._kept(whole.detach())
        if kept is None:
            return tensor
        kept.waiting += 1
        return _TensorView(kept, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _kept(self, whole: Tensor) -> _SavedActivation | None:
        storage = StorageWeakRef(whole.untyped_storage())
        known = self.seen.get(storage.cdata)
        if known is not None and known[1] == whole._version:
            return known[2]
        give = self.keeper.store(whole)
        kept = None if give is None else _SavedActivation(whole, give)
        self.seen[storage.cdata] = (storage, whole._version, kept)
        return kept


def _unpack(packed: "Tensor | _TensorView | _LocalView") -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if isinstance(packed, _LocalView):
        return dtensor_of_local(_unpack(packed.held), packed.mesh, packed.placements, packed.size, packed.stride)
    return packed.kept.view(packed.size, packed.stride, packed.offset)
