"""Model inputs with virtual tokens, which are the prompts or prefixes of adapters."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError, UsageError

_POSITIONS = re.compile(r"positions?|wpe|pos|pos_emb|pos_embed\w*|embed_positions|positions?_embed\w*")
_MASKS = ("attention_mask", "keep")


def input_names(module: nn.Module) -> list[str]:
    """Return the names of the module's inputs, also if a wrapper replaced its forward method.

    Raises RefusedError if the method takes `*args`.
    """
    _, *parameters = inspect.signature(type(module).forward).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise RefusedError(
            f"{type(module).__name__}.forward takes unnamed inputs (*args), so the input with the tokens is unknown",
            fix="give its inputs names: forward(self, tokens, keep=None)",
        )
    return [each.name for each in parameters]


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call, by name."""
    return dict(zip(input_names(module), args, strict=False)) | kwargs


def extend_masks(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Extend the masks in `inputs` by `count` visible tokens at the front. Return only the masks, (b, count + t).

    Raises UsageError for a mask that is not (b, t), for packed rows and for a cache of keys and values. In a packed row
    only the first text would follow the virtual tokens. Cached tokens would precede the virtual tokens.
    """
    refuse_shared_rows(inputs)
    if inputs.get("past_key_values") is not None:
        raise UsageError(
            "a model with virtual tokens cannot continue from a cache of keys and values",
            fix="generate with use_cache=False",
        )
    extended = {}
    for name in _MASKS:
        if (mask := inputs.get(name)) is not None:
            if mask.ndim != 2:
                raise UsageError(f"{name} has shape {tuple(mask.shape)}", fix=f"pass {name} with shape (batch, tokens)")
            extended[name] = F.pad(mask, (count, 0), value=1)
    return extended


def refuse_shared_rows(inputs: dict[str, Any]) -> None:
    """Raise UsageError if several texts are packed into a row (`segments`)."""
    if inputs.get("segments") is not None:
        raise UsageError(
            "virtual tokens need one text per row, but rows are packed", fix="--set objective.packed=false"
        )


def position_limit(model: nn.Module) -> int | None:
    """Return the number of positions in the model's smallest position table; None without position tables. A table is
    an embedding, a parameter (t, d) or (1, t, d), or a rotary table."""
    limits = []
    for name, module in model.named_modules():
        if isinstance(table := getattr(module, "cos", None), Tensor):  # rotary positions
            limits.append(len(table))
        elif _POSITIONS.fullmatch(name.rpartition(".")[2]) and hasattr(module, "num_embeddings"):
            limits.append(module.num_embeddings)
        own = (each for last, each in module.named_parameters(recurse=False) if _POSITIONS.fullmatch(last))
        limits += [parameter.shape[-2] for parameter in own if parameter.ndim > 1]
    return min(limits, default=None)


def refuse_beyond(limit: int | None, count: int, tokens: int) -> None:
    """Raise UsageError if `count` virtual tokens plus `tokens` real tokens exceed `limit` positions."""
    if limit is not None and count + tokens > limit:
        raise UsageError(
            f"'{count}' virtual tokens and '{tokens}' text tokens exceed the {limit} positions of the model",
            fix=f"--set data.length={limit - count}; or fewer virtual tokens",
        )


def common_path(names: Iterable[str]) -> str:
    """Return the name of the innermost module that contains the modules of all `names`."""
    shared: list[str] = []
    for words in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
