"""State of modules that a forward pass changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class ModuleState:
    """State of modules that a forward pass changes: buffers, attributes, and lists, dicts and sets in them."""

    def __init__(self, model: nn.Module):
        modules = [*model.modules()]
        values = (item for module in modules for item in vars(module).items())
        # sharding replaces parameters, and keeps account of them
        filled = (each for name, each in values if name != "_parameters" and _is_filled(each))
        self._attributes = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
        self._values = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._filled = [(each, each.copy()) for each in filled]

    def put_back(self) -> None:
        """Restore the stored state."""
        for module, attributes, buffers in self._attributes:
            _replace_entries(module.__dict__, attributes)
            _replace_entries(module._buffers, buffers)
        for each, content in self._filled:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(content)
        for buffer, value in self._values:
            buffer.data.copy_(value)  # a counted write would make the backward pass of an earlier call fail


@contextmanager
def restore_module_state(model: nn.Module) -> Iterator[None]:
    """Undo changes that a forward pass makes to modules."""
    before = ModuleState(model)
    try:
        yield
    finally:
        before.put_back()


def _is_filled(value: Any) -> bool:
    """Return True for a container that a module may fill, of a class whose methods are known."""
    return type(value) in (list, dict, set)


def _replace_entries(old: dict, new: dict) -> None:
    old.clear()
    old.update(new)
