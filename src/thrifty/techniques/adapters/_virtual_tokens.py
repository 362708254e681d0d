"""Room in a model's inputs for tokens that are in no text: prompts and prefixes of adapters."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError

_POSITIONS = re.compile(r"positions?|wpe|pos_embed\w*|embed_positions|positions?_embed\w*")
_MASKS = ("attention_mask", "keep")


def input_names(module: nn.Module) -> list[str]:
    """What a module's class calls the inputs of its forward, however that is wrapped. Raises RefusedError where it
    takes them without names."""
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise RefusedError(
            f"{type(module).__name__}.forward takes its inputs without names, so none is known to be the tokens",
            fix="give its inputs names: forward(self, tokens, keep=None)",
        )
    return [each.name for each in parameters]


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Everything a module was called with, by name."""
    return dict(zip(input_names(module), args, strict=False)) | kwargs


def extend_masks(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Masks (b, t) of inputs by name, longer by `count` tokens in front that all may see.

    Raises UsageError for a mask of another shape, for several texts in one row, of which only the first would be
    behind the virtual tokens, and for a cache: what is in it would be before them, and an empty one would be used
    later on.
    """
    refuse_shared_rows(inputs)
    if inputs.get("past_key_values") is not None:
        raise UsageError(
            "a model with virtual tokens cannot go on from a cache of what it read", fix="generate with use_cache=False"
        )
    longer = {}
    for name in _MASKS:
        if (mask := inputs.get(name)) is not None:
            if mask.ndim != 2:
                raise UsageError(f"{name} has shape {tuple(mask.shape)}", fix="give one of shape (batch, tokens)")
            longer[name] = F.pad(mask, (count, 0), value=1)
    return longer


def refuse_shared_rows(inputs: dict[str, Any]) -> None:
    """Raises UsageError where the inputs of a model say that several texts share a row."""
    if inputs.get("segments") is not None:
        raise UsageError(
            "virtual tokens stand before a row, and several texts share one", fix="--set objective.packed=false"
        )


def position_limit(model: nn.Module) -> int | None:
    """How many tokens the tables of positions in a model have room for; None where it has no tables."""
    limits = []
    for name, module in model.named_modules():
        if isinstance(table := getattr(module, "cos", None), Tensor):  # of rotary positions
            limits.append(len(table))
        elif _POSITIONS.fullmatch(name.rpartition(".")[2]) and hasattr(module, "num_embeddings"):
            limits.append(module.num_embeddings)
    return min(limits, default=None)


def refuse_beyond(limit: int | None, count: int, tokens: int) -> None:
    """Raises UsageError where `count` virtual tokens and `tokens` real ones do not fit a model of `limit` positions."""
    if limit is not None and count + tokens > limit:
        raise UsageError(
            f"the model has {limit} positions, {count} of them virtual tokens', and was given {tokens} tokens",
            fix=f"give it {limit - count} tokens or fewer (data.length), or take fewer virtual ones",
        )


def common_path(names: Iterable[str]) -> str:
    """The module that holds all of these, by name."""
    shared: list[str] = []
    for words in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
