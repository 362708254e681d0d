"""State of modules that a forward pass changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def restore_module_state(model: nn.Module) -> Iterator[None]:
    """Undo changes that a forward pass makes to modules: buffers, attributes, and lists, dicts and sets in them."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    filled = [(each, each.copy()) for module in model.modules() for each in vars(module).values() if _is_filled(each)]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            _replace_entries(module.__dict__, attributes)
            _replace_entries(module._buffers, buffers)
        for each, content in filled:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(content)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _is_filled(value: Any) -> bool:
    """Return True for a container that a module may fill, of a class whose methods are known."""
    return type(value) in (list, dict, set)


def _replace_entries(old: dict, new: dict) -> None:
    old.clear()
    old.update(new)
