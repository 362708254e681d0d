"""Encoders of text whose blocks process a part of the tokens of each text, at the tokens' own positions.

The blocks receive the visible tokens, and the rows of masks and positions that belong to them. After the last block all
tokens are put together again. Shapes: b batch, t tokens of a text, n visible tokens, d width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thrifty.core.errors import RefusedError, class_name, reason_of
from thrifty.core.eval_mode import eval_mode
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import output_head
from thrifty.core.randomness import preserved_draws
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens
from thrifty.modeling.attention_cores import has_values
from thrifty.modeling.embeddings import token_tables
from thrifty.modeling.module_surgery import change_first, find_stacks, refuse_repeated

Rest = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block after its input."""
Finish = Callable[[Tensor, Rest], Tensor]
"""Function of all states (b, t, d) after the last block and of the first block's further arguments for all tokens."""
PROBE = 7
"""Number of tokens of a test call; no usual width is 7."""
POSITION_DIMS: ModuleNote[tuple[str, list[tuple[int, ...] | None]]] = ModuleNote("position_dims")
"""Structure of a block's further arguments in the test call, and the dims of each that are positions; None for an
argument that is no tensor. In other calls, a width may equal the number of tokens."""


@dataclass
class Selection:
    """The visible tokens in one call of a model."""

    visible: Tensor
    blocks: tuple[nn.Module, ...]
    finish: Finish
    embedded: Tensor | None = None
    """Input of the first block for all tokens, (b, t, d)."""
    rest: Rest = field(default_factory=lambda: ((), {}))
    calls: int = 0
    """Number of calls of the last block."""


# the hooks have no state of their own, so that copies of a model act as the model does
CURRENT: ContextVar[Selection | None] = ContextVar("selection", default=None)


def prepare(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Prepare an encoder for `visible_tokens_only`, and return the name and the list of its blocks.

    Raises RefusedError for a model with several stacks, for blocks in several places, and for a model whose blocks
    determine positions by the order of their inputs, such as rotary positions computed in each block.
    """
    stacks = find_stacks(model)
    if len(stacks) > 1:
        raise RefusedError(
            f"{class_name(model)} has {len(stacks)} stacks of blocks, but an encoder has one",
            fix="use an encoder, such as --set model.preset=bert-micro",
        )
    if not token_tables(model):
        raise RefusedError(
            f"{class_name(model)} has no embedding of tokens, so it is no encoder of text",
            fix="use an encoder, such as --set model.preset=bert-micro",
        )
    ((name, blocks),) = stacks.items()
    refuse_repeated(name, blocks)
    for block in blocks:
        block.register_forward_pre_hook(_select, with_kwargs=True)
        block.register_forward_hook(_put_together)
    refuse_own_positions(model)
    return name, blocks


@torch.no_grad()
def refuse_own_positions(model: nn.Module) -> None:
    """Raise RefusedError if the outputs depend on the order in which the blocks receive the tokens. Without values, as
    while shapes are counted, only errors are found."""
    rows, like = next(iter(token_tables(model).values())).num_embeddings, next(model.parameters())
    tokens = (torch.arange(2 * PROBE, device=like.device) % rows).view(2, PROBE)
    draws = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(PROBE, generator=draws) for _ in tokens]).to(like.device)
    try:
        with eval_mode(model), preserved_draws([tokens]):
            expected = _states(model, tokens)
            with visible_tokens_only(model, order) as selection:
                actual = _states(model, tokens)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RefusedError(
            f"{class_name(model)} does not accept a part of the tokens of a text: {reason_of(error)}",
            fix="use an encoder whose blocks accept any number of tokens, such as --set model.preset=bert-micro",
        ) from error
    if selection.calls != 1:
        raise RefusedError(
            f"{class_name(model)} calls its last block {selection.calls} times, not once",
            fix="use an encoder with a block of its own in each place, such as --set model.preset=bert-micro",
        )
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    if has_values(expected) and (actual - expected).abs().max() > tolerance * expected.abs().max():
        raise RefusedError(
            f"the blocks of {class_name(model)} know positions only by the order of their inputs, so they cannot "
            "process a part of the tokens",
            fix="use an encoder with positions in its embedding, such as --set model.preset=bert-micro",
        )


def _states(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens)
    is_plain = output_head(model) is not None or isinstance(output, Tensor)
    return output if is_plain else next(iter(output.values()))


@contextmanager
def visible_tokens_only(
    model: nn.Module, visible: Tensor, finish: Finish = lambda states, rest: states
) -> Iterator[Selection]:
    """Let the blocks of a prepared model process only the tokens at the positions `visible` (b, n) inside the context.

    The states of all other tokens are those of the first block's input. `finish` changes all states after the last
    block.
    """
    ((_, blocks),) = [(name, blocks) for name, blocks in find_stacks(model).items() if "mask_decoder" not in name]
    token = CURRENT.set(selection := Selection(visible, (*blocks,), finish))
    try:
        yield selection
    finally:
        CURRENT.reset(token)
    if not selection.calls:
        raise RefusedError(
            f"the loss did not call the blocks of {class_name(model)}, so they read all tokens",
            fix="call the model itself in the loss; or --without data_selection.drop_masked_tokens",
        )


@torch.compiler.disable
def _select(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    selection = CURRENT.get()
    if selection is None or not any(block is each for each in selection.blocks):
        return None
    name = None if args else next(iter(kwargs))
    x = args[0] if name is None else kwargs[name]
    rest = args[1:], {key: value for key, value in kwargs.items() if key != name}
    if block is selection.blocks[0]:
        selection.embedded, selection.rest = x, rest
        x = gather_tokens(x, selection.visible)
    assert selection.embedded is not None
    values, structure = tree_flatten(rest)
    dims = _position_dims(block, values, repr(structure), selection.embedded.shape[1])
    rows = [_rows_of(selection.visible, each, value) for each, value in zip(dims, values, strict=True)]
    more, named = tree_unflatten(rows, structure)
    return ((x, *more), named) if name is None else (more, {name: x, **named})


def _position_dims(block: nn.Module, values: list[Any], structure: str, total: int) -> list[tuple[int, ...]]:
    """Return the dims of each argument that have a row for each of `total` tokens."""
    dims = [
        tuple(dim for dim in (-2, -1) if value.ndim + dim > 0 and value.shape[dim] == total)
        if isinstance(value, Tensor)
        else ()
        for value in values
    ]
    noted = POSITION_DIMS.get(block)
    if noted is None and total == PROBE:
        known = [each if isinstance(value, Tensor) else None for each, value in zip(dims, values, strict=True)]
        POSITION_DIMS.set(block, (structure, known))
    if noted is None or noted[0] != structure:
        return dims
    return [
        each if known is None else tuple(dim for dim in each if dim in known)
        for each, known in zip(dims, noted[1], strict=True)
    ]


def _rows_of(visible: Tensor, dims: tuple[int, ...], value: Any) -> Any:
    """Return the part of an argument that belongs to the visible tokens (b, n): (…, n, k) of positions (…, t, k), and
    (…, n, n) of a mask (…, t, t). `dims` are the dims of positions."""
    for dim in dims:
        value = value.expand(len(visible), *value.shape[1:])
        shape, sizes = [1] * value.ndim, [*value.shape]
        shape[0], shape[dim] = visible.shape
        sizes[dim] = -1
        value = value.gather(dim, visible.view(shape).expand(sizes))
    return value


@torch.compiler.disable
def _put_together(block: nn.Module, inputs: Any, output: Any) -> Any:
    selection = CURRENT.get()
    if selection is None or block is not selection.blocks[-1]:
        return None
    selection.calls += 1
    embedded = selection.embedded
    assert embedded is not None

    def whole(states: Tensor) -> Tensor:
        return selection.finish(scatter_tokens(states, selection.visible, embedded, embedded.shape[1]), selection.rest)

    return change_first(output, whole)
