"""State of modules that a forward pass changes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def restore_module_state(model: nn.Module) -> Iterator[None]:
    """Undo changes that a forward pass makes to modules, such as buffers and attributes."""
    before = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            _replace_entries(module.__dict__, attributes)
            _replace_entries(module._buffers, buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _replace_entries(old: dict, new: dict) -> None:
    old.clear()
    old.update(new)
