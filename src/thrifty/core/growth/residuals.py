"""Whether the blocks of a model add to a stream and do nothing else to it: without what their branches give they are
the identity. So it is with the norm in front of each branch, and not with the norm behind the sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from thrifty.core.accounting import unseen
from thrifty.core.branches import Branch, find_branches, in_width, is_decoder
from thrifty.core.errors import Refused
from thrifty.core.surgery import find_stacks, note

TOKENS = 4
"""Of the stream that is given to a block to see what it does."""


def refuse_normed_sums(model: nn.Module, why: str) -> None:
    """Raises Refused where a block whose branches give nothing changes the stream; `why` is what that would break.

    The first block of each stack is tried on random hidden states. One that takes more than those (positions, say)
    cannot be tried and is noted; fake tensors have no values to compare.
    """
    stacks = find_stacks(model)
    for stack, branches in find_branches(model).items():
        block = stacks[stack][0]
        if any(is_fake(parameter) for parameter in block.parameters()):
            continue
        stays = _keeps_the_stream(block, branches[0], is_decoder(branches))
        if stays is None:
            note(f"blocks of {stack or 'the model'} could not be tried alone; they are taken to be pre-norm")
        elif not stays:
            raise Refused(
                f"{type(block).__name__} has a norm behind its sums: {why}",
                fix="take a pre-norm model, for instance --set model.preset=llama-nano",
            )


def _keeps_the_stream(block: nn.Module, branches: list[Branch], is_decoder: bool) -> bool | None:
    """None where the block cannot be run on hidden states alone."""
    like = next(block.parameters())
    devices = [like.device.index] if like.device.type == "cuda" else []
    with unseen(), torch.no_grad(), torch.random.fork_rng(devices), _silent(branches):
        first = next(iter(branches[0].inner.values()))
        x = torch.randn(1, TOKENS, in_width(first), device=like.device, dtype=like.dtype)
        try:
            output = block(x, None, x) if is_decoder else block(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None
        output = output[0] if isinstance(output, tuple) else output
        return torch.equal(output, x)


@contextmanager
def _silent(branches: list[Branch]) -> Iterator[None]:
    hooks = [branch.writer.register_forward_hook(_nothing) for branch in branches]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _nothing(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output) if isinstance(output, Tensor) else output
