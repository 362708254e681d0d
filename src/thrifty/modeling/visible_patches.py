"""Image models that process a part of the patches of each image, at the patches' own positions.

Patches are removed after their positions were added: from the output of the patch embedding if it adds positions,
otherwise from the input of the first block. Works for models with a convolution that cuts the patches, and blocks that
accept any number of tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, class_name
from thrifty.kernels.token_gather import gather_tokens
from thrifty.modeling.module_surgery import change_first, find_stacks, is_under
from thrifty.modeling.patch_grid import find_grid

Choice = Callable[[int], Tensor]
"""Function from the number of patches t to the ascending indices (b, n) of the visible ones."""


@dataclass
class Removal:
    """The removal of patches in one call of a model."""

    choice: Choice
    patches: int = 0
    """Number of patches of the current images."""
    tokens: int = 0
    """Number of tokens before the removal; 0 before it. A recomputed block removes the same patches again."""


# the hooks have no state of their own, so that copies of a block, as in growth, act as the block does
CURRENT: ContextVar[Removal | None] = ContextVar("removal", default=None)


def without_patches(tokens: Tensor, visible: Tensor, before: int) -> Tensor:
    """Remove the patches that are not visible. Tokens are (b, before + t, d), the result is (b, before + n, d).

    `visible` (b, n) are indices of patches. The first `before` tokens are no patches and stay.
    """
    return torch.cat((tokens[:, :before], gather_tokens(tokens[:, before:], visible)), 1)


def prepare(model: nn.Module) -> str:
    """Prepare a model for `visible_only`, and return the place in words, such as "after embeddings".

    Raises RefusedError without a convolution in front of the blocks.
    """
    grid, stacks = find_grid(model), find_stacks(model)
    grid.cut.register_forward_hook(_count)
    parts = grid.name.split(".")
    owners = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    around = [owner for owner in owners if any(is_under(stack, owner) for stack in stacks)]
    embedding = model.get_submodule(owners[len(around)])
    if isinstance(embedding, nn.ModuleList | nn.ModuleDict):
        raise RefusedError(
            f"{class_name(model)} cuts its images several times, so a part of the patches is no input",
            fix="use a Vision Transformer, such as --set model.preset=vit-nano",
        )
    tensors = (*embedding.named_parameters(), *embedding.named_buffers())
    if any("pos" in path for path, _ in tensors):
        embedding.register_forward_hook(_after_embedding)
        return f"after {owners[len(around)]}"
    nearest = next(stack for stack in stacks if is_under(stack, around[-1]))
    for block in stacks[nearest]:
        block.register_forward_pre_hook(_before_first_block, with_kwargs=True)
    return f"before {nearest}.0"


def _count(cut: nn.Module, inputs: Any, output: Tensor) -> None:
    if (removal := CURRENT.get()) is not None:
        removal.patches = output.shape[-2:].numel()


@torch.compiler.disable
def _after_embedding(embedding: nn.Module, inputs: Any, output: Any) -> Any:
    return change_first(output, partial(_visible, embedding))


@torch.compiler.disable
def _before_first_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (_visible(block, args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: _visible(block, kwargs[first])}


def _visible(place: nn.Module, tokens: Tensor) -> Tensor:
    removal = CURRENT.get()
    if removal is None or removal.tokens not in (0, tokens.shape[1]):
        return tokens
    if not isinstance(tokens, Tensor) or tokens.ndim != 3 or tokens.shape[1] < removal.patches:
        raise RefusedError(
            f"{type(place).__name__} has no sequence of patches (batch, patches, width), but a tensor of shape "
            f"{tuple(getattr(tokens, 'shape', ()))}",
            fix="use a Vision Transformer, such as --set model.preset=vit-nano",
        )
    removal.tokens = tokens.shape[1]
    return without_patches(tokens, removal.choice(removal.patches), tokens.shape[1] - removal.patches)


@contextmanager
def visible_only(model: nn.Module, choice: Choice) -> Iterator[None]:
    """Process only the chosen patches of the images that a prepared model receives inside the context. Raise
    RefusedError if the model removed none."""
    token = CURRENT.set(removal := Removal(choice))
    try:
        yield
    finally:
        CURRENT.reset(token)
    if not removal.tokens:
        raise RefusedError(
            f"no patches were removed, because the loss does not call a part of {class_name(model)} in the usual way",
            fix="call the model itself in the loss; or leave out the technique that drops patches",
        )
