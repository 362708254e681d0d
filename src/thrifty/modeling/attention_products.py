"""Matmuls of attention: of queries and keys, and of weights and values, in the forms in which modules write them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
"""Matmuls that add a tensor."""


def score_product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, float, Tensor | None] | None:
    """Return queries (…, t, k), keys (…, s, k), scale and bias of a matmul of two activations; None for other calls."""
    if func in PRODUCTS and len(args) > 1 and args[0].ndim > 2 and args[1].ndim > 2:
        return args[0], args[1].transpose(-2, -1), 1.0, None
    if func in ADDED_PRODUCTS and len(args) == 1:
        args = (args[0], kwargs["batch1"], kwargs["batch2"])
    if func in ADDED_PRODUCTS and len(args) == 3:
        bias = args[0] * kwargs["beta"] if kwargs.get("beta", 1) != 1 else args[0]
        return (
            args[1],
            args[2].transpose(-2, -1),
            float(kwargs.get("alpha", 1)),
            bias if kwargs.get("beta", 1) else None,
        )
    if func is torch.einsum and len(args) == 3 and (parts := _letters(args[0])):
        (q, k, out), (t, s) = parts, parts[2][-2:]
        common = [letter for letter in q if letter in k and letter not in out]
        if len(common) == 1 and t in q and t not in k and s in k and s not in q:
            lead = out[:-2]
            if all(letter in q and letter in k for letter in lead):
                order = [*lead, t, common[0]], [*lead, s, common[0]]
                return _permuted(args[1], q, order[0]), _permuted(args[2], k, order[1]), 1.0, None
    return None


def value_product(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Return the values (…, s, k) of a matmul with attention weights, and a function that orders the dimensions of the
    result (…, t, k) as the matmul does; None for other calls."""
    if func in PRODUCTS:
        return args[1], lambda result: result
    if func is torch.einsum and len(args) == 3 and (parts := _letters(args[0])):
        weights, v, out = parts
        (lead, (t, s)), width = (weights[:-2], weights[-2:]), [letter for letter in v if letter not in weights]
        if len(width) == 1 and {*out} == {*lead, t, *width} and {*v} == {*lead, s, *width}:
            return _permuted(args[2], v, [*lead, s, *width]), lambda result: _permuted(result, [*lead, t, *width], out)
    return None


def _letters(equation: Any) -> tuple[list[str], list[str], list[str]] | None:
    """Return the letters of an einsum of two tensors; None for equations without an arrow or with an ellipsis."""
    if not isinstance(equation, str) or "." in equation or equation.count(",") != 1 or "->" not in equation:
        return None
    inputs, out = equation.replace(" ", "").split("->")
    first, second = inputs.split(",")
    return (list(first), list(second), list(out)) if len(out) > 2 else None


def _permuted(x: Tensor, letters: Sequence[str], order: Sequence[str]) -> Tensor:
    return x.permute([letters.index(letter) for letter in order])


def are_scores(product: tuple[Tensor, Tensor, float, Tensor | None], result: Any) -> bool:
    queries, keys, _, _ = product
    is_matrix = isinstance(result, Tensor) and result.is_floating_point()
    return is_matrix and result.shape[-2:] == (queries.shape[-2], keys.shape[-2])
