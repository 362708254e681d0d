"""Buffers that a forward pass writes: put back where it runs again or its step is skipped, the same on all ranks."""

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
"""Numbers of a buffer up to which it is always copied; one of more is where the first forward pass has changed it."""

_CONSTANT: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The large buffers of each module that its first forward pass left as they were."""


class BufferSnapshot:
    """The values that a module's forward pass begins with, of all buffers that it may write."""

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
        """Bytes of the values that may be let go."""
        return sum(tensor_bytes(value) for _, _, value in self.values if value.numel() > SMALL)

    def forget_constant(self) -> None:
        """Let go of large values that are what they were, once the first forward pass is over. Whether one is is looked
        at once for each module, since a GPU has to be waited for."""
        looked = {owner for owner, _, _ in self.values if owner in _CONSTANT}
        for owner, name, value in self.values:
            if value.numel() > SMALL and owner not in looked and not is_fake(value):
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
        """Write the values as they were."""
        for owner, name, value in self.values:
            _write(owner, name, owner._buffers[name], value)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The values as they were, for as long as the block lasts; afterwards they are again what they are now."""
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
    """Give every rank of a group (None: all) the persistent buffers of its first rank, as DistributedDataParallel does:
    each rank's forward pass writes statistics of its own examples."""
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
    """Gives a buffer its value, as autograd does not see: what it saved of the buffer has this value too."""
    if buffer is None or value is None or buffer.shape != value.shape:
        owner._buffers[name] = value
        return
    owner._buffers[name] = buffer
    buffer.data.copy_(value)
