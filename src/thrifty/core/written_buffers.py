"""Buffers that a forward pass writes, such as batch-norm statistics: snapshot, restore and broadcast.

The buffers are restored if a forward pass is recomputed or its step is skipped. `broadcast_buffers` makes them equal on
all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.shard_layout import local_tensor
from thrifty.core.tensor_tracing import tensor_bytes

SMALL = 2**16
"""Maximum number of elements of a buffer that is always copied. Larger buffers are copied if the first forward pass
changed them."""

_CONSTANT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Names of each module's large buffers that its first forward pass did not change."""


class BufferSnapshot:
    """Copies of all buffers that a module's forward pass may write, taken before the pass."""

    def __init__(self, *modules: nn.Module):
        owners = {id(owner): owner for module in modules for owner in module.modules()}.values()
        self.values = [
            (owner, name, buffer.clone())
            for owner in owners
            for name, buffer in owner._buffers.items()
            if buffer is not None and (buffer.numel() <= SMALL or name not in _CONSTANT.get(owner, ()))
        ]

    @property
    def large(self) -> int:
        """Bytes of the copies of large buffers, which `forget_constant` may free."""
        return sum(tensor_bytes(value) for _, _, value in self.values if value.numel() > SMALL)

    def forget_constant(self) -> None:
        """Free the copies of large buffers that did not change. Call it after the first forward pass. Each module is
        compared only once, because the comparison synchronizes with a GPU."""
        compared = {owner for owner, _, _ in self.values if owner in _CONSTANT}
        for owner, name, value in self.values:
            if value.numel() > SMALL and owner not in compared and not is_fake(value):
                now = owner._buffers[name]
                constant = _CONSTANT.setdefault(owner, set())
                if now is not None and now.shape == value.shape and torch.equal(now, value):
                    constant.add(name)
        self.values = [
            (owner, name, value)
            for owner, name, value in self.values
            if value.numel() <= SMALL or name not in _CONSTANT.get(owner, ())
        ]

    def put_back(self) -> None:
        """Write the copied values into the buffers."""
        for owner, name, value in self.values:
            _write(owner, name, owner._buffers[name], value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Use the copied values inside the block, and restore the present values afterwards."""
        with _disable_current_modes():  # torch's selective checkpoint counts the operations of both runs
            now = [(owner, name, owner._buffers[name]) for owner, name, _ in self.values]
            copies = [None if buffer is None else buffer.clone() for _, _, buffer in now]
            self.put_back()
        try:
            yield
        finally:
            with _disable_current_modes():
                for (owner, name, buffer), value in zip(now, copies, strict=True):
                    _write(owner, name, buffer, value)


def broadcast_buffers(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Copy the persistent buffers of a group's first rank to all ranks of the group, as DistributedDataParallel does.
    Otherwise each rank would have statistics of its own examples. A group of None means all ranks."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for owner in model.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                alike.setdefault(buffer.dtype, []).append(local_tensor(buffer))
    for buffers in alike.values():
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.broadcast(flat, group=group, group_src=0)
        for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def _write(owner: nn.Module, name: str, buffer: Tensor | None, value: Tensor | None) -> None:
    """Write a buffer's value without autograd's version counter, so that saved tensors that share it change too."""
    if buffer is None or value is None or buffer.shape != value.shape:
        owner._buffers[name] = value
        return
    owner._buffers[name] = buffer
    buffer.data.copy_(value)
