"""Attention calls of a module, caught while it runs and answered by a core.

A mode of torch sees the functions that the module calls (`CatchAttention`). A call of `scaled_dot_product_attention` is
answered by the core. In a module with its own softmax, the mode recognizes a matmul of queries and keys, the operations
on its result, a softmax over keys, and the matmul of the weights with the values. The last matmul is answered by the
core. The module still computes its own scores, and from them the core's mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thrifty.modeling.attention_cores import (
    HIDDEN,
    AttentionCore,
    call_core,
    has_values,
    visible_and_bias,
)
from thrifty.modeling.attention_products import are_scores, score_product, value_product

SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
SCALINGS = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__), 1),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__), -1),
}
"""Functions that scale scores by a number, with the exponent of the number."""
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.add_, Tensor.__iadd__, Tensor.__radd__}
HIDING = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where, torch.max}
FILLS = {Tensor.__setitem__, Tensor.fill_, Tensor.masked_fill_}
"""Functions that may hide pairs by a write into scores or into a view of them."""
RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, Tensor.flatten, torch.flatten}
CONVERSIONS = {
    Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.contiguous,
    torch.nan_to_num, Tensor.nan_to_num,
}  # fmt: skip
"""Functions that change the dtype or the layout of scores and weights, but not their values."""

SLICE = "an in-place write to a slice"


class CatchAttention(TorchFunctionMode):
    """A mode that shows the functions of torch that a module calls to a `CaughtCall`."""

    def __init__(self, call: "CaughtCall"):
        super().__init__()
        self.call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.call.result_of(func, args, kwargs or {})


@dataclass(eq=False)
class Scores:
    """Scores `scale` · q kᵀ + `bias` of a module, from their matmul to its softmax."""

    value: Tensor
    """The scores, and the result of the module's operations on them."""
    version: int
    """Number of known writes to the scores."""
    queries: Tensor
    keys: Tensor
    scale: float
    bias: Tensor | None

    def reshape(self, lead: torch.Size) -> None:
        """Change the dimensions before tokens and channels, as the module does to its scores."""
        before = self.value.shape[:-2]
        self.queries, self.keys = (_reshaped(each, before, lead) for each in (self.queries, self.keys))
        self.bias = None if self.bias is None else _reshaped(self.bias, before, lead)


def _reshaped(x: Tensor, before: torch.Size, lead: torch.Size) -> Tensor:
    return x.expand(*before, *x.shape[-2:]).reshape(*lead, *x.shape[-2:])


class CaughtCall:
    """One call of an attention module, whose attention is answered by a core.

    A module may compute other matmuls of queries too, such as with its positions, so all are followed to the softmax.
    Scores far below zero are hidden pairs.
    """

    def __init__(self, core: AttentionCore, causal: bool, heads: int | None = None):
        self.core, self.causal, self.heads, self.is_done = core, causal, heads, False
        self.reason = ""
        """Why a softmax over keys was not recognized as attention; "" if there was none."""
        self.followed: list[Scores] = []
        self.pairs: set[torch.Size] = set()
        """Numbers of queries and keys of all matmuls."""
        self.passed = ""
        """Name of the function that ended the operations on the latest scores; "" if there was none."""
        self.scores: Scores | None = None
        """The scores of the softmax."""
        self.mask: Tensor | None = None
        self.weights: Tensor | None = None
        """Result of the softmax, and of the module's operations on it."""
        self.version = 0
        """Number of known writes to the weights."""
        self.dropout = 0.0

    def result_of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(func, *args, **kwargs)
        if self.weights is not None and _has(args, kwargs, self.weights):
            return self.on_weights(func, args, kwargs)
        scores = next((each for each in self.followed if _has(args, kwargs, each.value)), None)
        is_eager = bool(self.followed) and not torch.compiler.is_compiling()
        if is_eager and func in FILLS and (scores is None or func is Tensor.__setitem__):
            return self.on_writes(func, args, kwargs)
        if scores is not None and scores.version == writes_to(scores.value):
            return self.on_scores(scores, func, args, kwargs)
        if scores is not None:
            self.drop(scores, SLICE)
        result = called(func, args, kwargs)
        if (product := score_product(func, args, kwargs)) is not None and are_scores(product, result):
            self.followed.append(Scores(result, writes_to(result), *product))
            self.pairs.add(result.shape[-2:])
        if func in SOFTMAX and result.shape[-2:] in self.pairs:
            self.reason = f"its scores pass {self.passed or 'other operations'}"
        return result

    def on_writes(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow a write into scores or into a view of them. Scores stay followed if it only hides pairs."""
        before = [writes_to(scores.value) for scores in self.followed]
        result = called(func, args, kwargs)
        hides = _only_hides(args[2:] if func is Tensor.__setitem__ else args[1:], kwargs, args[0])
        for scores, count in zip([*self.followed], before, strict=True):
            if hides:
                scores.version += writes_to(scores.value) - count
            elif scores.value is args[0]:
                self.drop(scores, SLICE)
        return result

    def drop(self, scores: Scores, passed: str) -> None:
        """Stop following scores, because a core cannot repeat the operation `passed`."""
        self.passed = passed
        self.followed.remove(scores)

    def on_scores(self, scores: Scores, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the module's operations on scores to its softmax."""
        before, result = scores.value, called(func, args, kwargs)
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, result.ndim - 1):
                self.weights, self.mask, self.scores = result, before.detach() > HIDDEN, scores
                self.version = writes_to(result)
                self.reason = "its weights are not multiplied with values"
            return result
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape[-2:] != before.shape[-2:]:
            return result
        other = next((each for each in args if each is not before), None)
        if func in SCALINGS and isinstance(other, int | float):
            factor = float(other) ** SCALINGS[func]
            scores.scale, scores.bias = scores.scale * factor, None if scores.bias is None else scores.bias * factor
        elif func in SCALINGS and isinstance(other, Tensor) and other.shape[-2:].numel() == 1:  # one number per head
            factors = other if SCALINGS[func] > 0 else 1 / other
            scores.queries = scores.queries * factors
            scores.bias = None if scores.bias is None else scores.bias * factors
        elif func in ADDITIONS and isinstance(other, Tensor) and kwargs.get("alpha", 1) == 1:
            addend = visible_and_bias(other)[1]
            if addend is not None:
                scores.bias = addend if scores.bias is None else scores.bias + addend
        elif func in RESHAPES:
            scores.reshape(result.shape[:-2])
        elif func not in CONVERSIONS and not (func in HIDING and _only_hides(args, kwargs, before)):
            self.drop(scores, getattr(func, "__name__", str(func)))
            return result
        scores.value, scores.version = result, writes_to(result)
        return result

    def on_weights(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the matmul of weights and values. Follow dropout and conversions of the weights until then."""
        assert self.weights is not None
        if self.version != writes_to(self.weights):
            self.weights, self.reason = None, f"its weights pass {SLICE}"
            return called(func, args, kwargs)
        if (product := value_product(func, args)) is not None:
            return self.attended(*product)
        result = called(func, args, kwargs)
        if func in (F.dropout, torch.dropout):
            values = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            self.dropout = values["p"] if values["training"] else 0.0
        if func in (F.dropout, torch.dropout) or func in CONVERSIONS or func in RESHAPES:
            self.weights, self.version = result, writes_to(result)
        else:
            self.reason = f"its weights pass {getattr(func, '__name__', func)}"
            if result is self.weights or (not torch.compiler.is_compiling() and func is Tensor.__setitem__):
                self.weights = None  # changed in place
        return result

    def attended(self, values: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the attention over values (…, s, k), whose other dimensions may be merged."""
        assert self.scores is not None and self.mask is not None and self.weights is not None
        lead, final = self.mask.shape[:-2], torch.broadcast_shapes(self.weights.shape[:-2], values.shape[:-2])
        if values.shape[:-2].numel() == lead.numel():
            values = values.reshape(*lead, *values.shape[-2:])
        scores = self.scores
        result = self.answer(scores.queries, scores.keys, values, self.mask, self.dropout, scores.bias, scores.scale)
        self.weights = self.scores = None
        return finish(result.reshape(*final, *result.shape[-2:]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Answer a call with the arguments of torch's function. Queries of another sequence are left to torch, as is
        a single query of a cached text."""
        is_single = self.causal and not is_causal and attn_mask is None
        if query.shape[-2] != key.shape[-2] or is_single:
            self.is_done = True
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask, bias = (None, None) if attn_mask is None else visible_and_bias(attn_mask)
        if is_causal and not self.causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        return self.answer(query, key, value, mask, dropout_p, bias, scale or query.shape[-1] ** -0.5)

    def answer(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Return the core's attention (…, t, k) for queries (…, t, k). Dimensions before the last two are examples and
        heads."""
        self.is_done = True
        lead = query.shape[:-2]
        # dimensions of examples: those before the heads, or all if heads and examples are one dimension
        examples = 1 if len(lead) < 2 or lead[1:].numel() == self.heads else len(lead) - 1

        def with_heads(x: Tensor) -> Tensor:
            """Return a tensor in the dimensions (b, h, …, …)."""
            x = x[(None,) * (len(lead) + 2 - x.ndim)]
            if len(lead) == 2:
                return x
            x = x.expand(*lead, *x.shape[-2:])
            return x.reshape(lead[:examples].numel(), lead[examples:].numel(), *x.shape[-2:])

        q, k, v = (with_heads(each) for each in (query, key, value))
        if scale != (usual := q.shape[-1] ** -0.5):
            q = q * (scale / usual)
        mask, bias = (None if each is None else with_heads(each) for each in (mask, bias))
        mask = None if mask is None else mask.expand(len(q), -1, -1, -1)
        return call_core(self.core, q, k, v, mask, dropout, bias).reshape(*lead, -1, value.shape[-1])

    def multi_head(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Answer a call of nn.MultiheadAttention, for queries (t, b, d) or (t, d). Attention to another sequence, whose
        keys are its values, is left to torch. Otherwise weights are not returned."""
        is_own = (query is key or key is not value) and query.shape == key.shape == value.shape
        is_own = is_own and bias_k is None and not add_zero_attn
        if not is_own or in_proj_weight is None:
            self.is_done = True
            return func(
                query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
                add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
                attn_mask, **others,
            )  # fmt: skip
        inputs = [each if each.ndim == 3 else each[:, None] for each in (query, key, value)]
        x, (t, b, d) = inputs[0], inputs[0].shape
        if query is key and key is value:
            projected = F.linear(x, in_proj_weight, in_proj_bias).chunk(3, -1)
        else:  # for example, positions are added to queries and keys only
            biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
            projected = [F.linear(*each) for each in zip(inputs, in_proj_weight.chunk(3), biases, strict=True)]
        q, k, v = (each.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for each in projected)  # (b, h, t, k) each
        mask = None if attn_mask is None else _added(attn_mask, x.dtype)
        if mask is not None:
            mask = mask.view(-1, num_heads, t, t) if mask.ndim == 3 else mask[None, None]
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, x.dtype).view(b, 1, 1, t)
            mask = padding if mask is None else mask + padding
        result = self.attend(q, k, v, mask, dropout_p if training else 0.0)
        out = F.linear(result.permute(2, 0, 1, 3).reshape(t, b, d), out_proj_weight, out_proj_bias)
        return (out if query.ndim == 3 else out[:, 0]), None


def _only_hides(args: tuple[Any, ...], kwargs: Mapping[str, Any], scores: Tensor) -> bool:
    """Return True if all numbers that a function puts in the place of scores hide pairs. Without values, as while code
    is compiled, tensors of one element are taken to hide."""
    values = [each for each in (*args, *kwargs.values()) if each is not scores]
    numbers = [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
    tensors = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    if has_values(scores):
        numbers += [each.max().item() for each in tensors]
    return all(number < HIDDEN for number in numbers) and all(each.numel() == 1 or has_values(each) for each in tensors)


def writes_to(x: Tensor) -> int:
    """Return the number of in-place writes to a tensor and its views. They are not counted while code is compiled, and
    for inference tensors."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch. Methods that torch writes in Python are called by name, as Dynamo requires."""
    is_python = getattr(func, "__module__", "") == "torch._tensor"
    return getattr(args[0], func.__name__)(*args[1:], **kwargs) if is_python else func(*args, **kwargs)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask of nn.MultiheadAttention, which is True at hidden pairs, as numbers that are added to scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def _has(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    return any(each is tensor for each in (*args, *kwargs.values()))
