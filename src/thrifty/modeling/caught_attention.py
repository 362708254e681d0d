"""Attention modules that call torch's attention function, or a softmax of their own, and the replacement of that call.

While such a module runs, a mode of torch sees the functions that it calls (`CatchAttention`). A call of
`scaled_dot_product_attention` is answered by the module's core. In a module with its own softmax, the mode recognizes a
matmul of queries and keys, the operations on its result, a softmax over keys, and the matmul of the weights with the
values. The last matmul is answered by the core. The module still computes its own scores, and from them the core's
mask. Which modules call attention is read from the names in their code (`calls_attention`), before they run.
"""

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode

from thrifty.core.errors import RefusedError
from thrifty.modeling.attention_cores import AttentionCore, AttentionSite, call_core
from thrifty.modeling.module_surgery import wrap_forward

LEAST = -9e3
"""Scores below this number are those of hidden pairs."""
MATMUL = "@"
SDPA = "scaled_dot_product_attention"
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
SCALINGS = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__), 1),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__), -1),
}
"""Functions that scale scores by a number, with the exponent of the number."""
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.add_, Tensor.__iadd__, Tensor.__radd__}
HIDING = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
CONVERSIONS = {Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.contiguous, Tensor.type}
"""Functions that change the dtype or the layout of scores and weights, but not their values."""


@dataclass(frozen=True)
class CaughtSite(AttentionSite):
    """An attention module whose call of an attention function is replaced."""

    def put(self, core: AttentionCore) -> None:
        if not hasattr(self.module, "thrifty_core"):
            wrap_forward(self.module, _catching)
        self.module.thrifty_core = _CoreOfSite(self, core)

    def take_away(self) -> None:
        if hasattr(self.module, "thrifty_core"):
            self.module.thrifty_core = None


@dataclass
class _CoreOfSite:
    site: CaughtSite
    core: AttentionCore


def _catching(module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    placed = module.thrifty_core
    if placed is None:
        return inner(*args, **kwargs)
    with CatchAttention(placed.site, placed.core) as catch:
        result = inner(*args, **kwargs)
    if not catch.is_done:
        raise RefusedError(
            f"the attention of {placed.site.name} was not recognized: {catch.reason}",
            fix=f"call torch.nn.functional.{SDPA} there",
        )
    return result


class CatchAttention(TorchFunctionMode):
    """A mode that answers the attention of one module by a core."""

    def __init__(self, site: CaughtSite, core: AttentionCore):
        super().__init__()
        self.site, self.core, self.is_done = site, core, False
        self.reason = "it calls neither torch's attention nor a softmax of queries and keys"
        self.queries: Tensor | None = None
        self.keys: Tensor | None = None
        self.scores: Tensor | None = None
        """The latest scores, and the result of the module's operations on them."""
        self.scale = 1.0
        """Factor of the scores so far."""
        self.mask: Tensor | None = None
        self.weights: Tensor | None = None
        self.dropout = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if self.weights is not None and first is self.weights:
            return self.on_weights(func, args, kwargs)
        if self.scores is not None and (first is self.scores or _has(args, self.scores)):
            return self.on_scores(func, args, kwargs)
        result = func(*args, **kwargs)
        operands = _operands(func, args)
        if operands is not None and _are_scores(*operands, result):
            self.queries, self.keys = operands
            self.scores, self.scale, self.mask = result, 1.0, None
        return result

    def on_scores(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the module's operations on the scores to its softmax."""
        result = func(*args, **kwargs)
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, result.ndim - 1):
                self.weights, self.mask = result, args[0].detach() > LEAST
            return result
        if not isinstance(result, Tensor) or result.shape[-2:] != self.scores.shape[-2:]:  # type: ignore[union-attr]
            return result
        other = args[1] if len(args) > 1 and args[0] is self.scores else args[0] if len(args) > 1 else None
        if func in SCALINGS and _is_number(other):
            self.scale *= float(other) ** SCALINGS[func]
        elif func in ADDITIONS and isinstance(other, Tensor):
            refuse_biases(other, self.site.name)
        elif func not in HIDING and func not in CONVERSIONS and func is not torch.where:
            self.reason = f"its scores pass {getattr(func, '__name__', func)}"
            self.scores = None
            return result
        self.scores = result
        return result

    def on_weights(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the matmul of weights and values. Follow dropout and conversions of the weights until then."""
        if func in PRODUCTS:
            return self.attended(args[1])
        result = func(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            values = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            self.dropout = values["p"] if values["training"] else 0.0
        if isinstance(result, Tensor) and result.shape == self.weights.shape:  # type: ignore[union-attr]
            self.weights = result
        return result

    def attended(self, values: Tensor) -> Tensor:
        assert self.queries is not None and self.keys is not None
        scale, mask, dropout = self.scale, self.mask, self.dropout
        self.weights = self.scores = None
        return self.attend(self.queries, self.keys, values, mask, dropout, scale=scale)

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
        self.is_done = True
        if query.shape[-2] != key.shape[-2] or (self.site.causal and not is_causal and attn_mask is None):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask = None if attn_mask is None else visible_in(attn_mask, self.site.name)
        if is_causal and not self.site.causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            mask = mask[(None,) * (query.ndim - mask.ndim)]
            mask = with_heads(
                mask.expand(*query.shape[: max(1, query.ndim - 3)], *mask.shape[max(1, query.ndim - 3) :])
            )
        if query.ndim > 4:
            key, value = (each.expand(*query.shape[:-2], *each.shape[-2:]) for each in (key, value))
        q, k, v = (with_heads(each) for each in (query, key, value))
        if scale is not None and scale != (usual := q.shape[-1] ** -0.5):
            q = q * (scale / usual)
        result = call_core(self.core, q, k, v, mask, dropout_p)
        return result.reshape(*query.shape[:-1], value.shape[-1])

    def multi_head(
        self,
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
    ) -> tuple[Tensor, None]:
        """Answer a call of nn.MultiheadAttention, for queries (t, b, d) or (t, d). Weights are not returned."""
        is_plain = query is key and key is value and in_proj_weight is not None and bias_k is None
        if not is_plain or add_zero_attn:
            raise RefusedError(
                f"{self.site.name} attends to another sequence, or to additional keys",
                fix=f"use one nn.MultiheadAttention for each kind of attention; or {SDPA}",
            )
        x = query if query.ndim == 3 else query[:, None]
        t, b, d = x.shape
        projected = F.linear(x, in_proj_weight, in_proj_bias).view(t, b, 3, num_heads, d // num_heads)
        q, k, v = projected.permute(2, 1, 3, 0, 4)  # (b, h, t, k) each
        masks = []
        if attn_mask is not None:
            seen = seen_by_module(attn_mask, self.site.name)
            masks.append(seen.view(b, num_heads, t, t) if seen.ndim == 3 else seen[None, None])
        if key_padding_mask is not None:
            masks.append(seen_by_module(key_padding_mask, self.site.name).view(b, 1, 1, t))
        mask = masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None
        result = self.attend(q, k, v, mask, dropout_p if training else 0.0)
        out = F.linear(result.permute(2, 0, 1, 3).reshape(t, b, d), out_proj_weight, out_proj_bias)
        return (out if query.ndim == 3 else out[:, 0]), None


def with_heads(x: Tensor) -> Tensor:
    """Return queries, keys, values or a mask in four dimensions: (t, k), (b, t, k) or (…, h, t, k) as (b, h, t, k)."""
    if x.ndim > 4:
        return x.flatten(0, -4)
    return x if x.ndim == 4 else x[:, None] if x.ndim == 3 else x[None, None]


def visible_in(mask: Tensor, name: str) -> Tensor:
    """Return an additive or boolean mask of torch as a boolean mask, in which visible pairs are True."""
    if mask.dtype == torch.bool:
        return mask
    refuse_biases(mask, name)
    return mask > LEAST


def seen_by_module(mask: Tensor, name: str) -> Tensor:
    """Return a mask of nn.MultiheadAttention, which is True at hidden pairs, as a mask of visible pairs."""
    return ~mask if mask.dtype == torch.bool else visible_in(mask, name)


def refuse_biases(addend: Tensor, name: str) -> None:
    """Raise RefusedError if a tensor that is added to scores does more than hide pairs. Without values, as while
    code is compiled, nothing is checked."""
    if torch.compiler.is_compiling() or addend.is_meta or is_fake(addend):
        return
    if not bool(((addend == 0) | (addend < LEAST)).all()):
        raise RefusedError(
            f"{name} adds a position bias to its attention scores, which replaced attention cannot represent",
            fix="use positions in the embedding, or rotary positions",
        )


def calls_attention(module: nn.Module) -> bool:
    """Return True if the module's own code, but not a child, calls attention: torch's function, or a softmax and a
    matmul."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith("torch."):
        return False
    used = {name for function in _reachable(module) for name in _names(function.__code__)}
    has_product = not used.isdisjoint({"matmul", "bmm", "einsum", MATMUL})
    return SDPA in used or ("softmax" in used and has_product)


def is_causal(module: nn.Module) -> bool:
    """Return True if the module's code calls torch's attention with `is_causal=True`, as a constant or as an
    attribute of the module, and in no other way."""
    values = [
        _value(node, module, function.__code__.co_varnames[:1])
        for function in _reachable(module)
        for node in _causal_arguments(function)
    ]
    return bool(values) and all(value is True for value in values)


def _reachable(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the forward function of a module, and the methods and functions of its file that this function calls."""
    kind = type(module)
    todo: list[Any] = [kind.forward]
    seen: set[int] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        for name in _names(function.__code__):
            called = getattr(kind, name, None) or function.__globals__.get(name)
            called = called.__func__ if isinstance(called, MethodType) else called
            if isinstance(called, FunctionType) and called.__module__ == kind.__module__:
                todo.append(called)


def _names(code: CodeType) -> set[str]:
    """Return the names that code uses, also in nested functions, and MATMUL for the operator @."""
    own = {*code.co_names} | {MATMUL for each in dis.get_instructions(code) if each.argrepr in ("@", "@=")}
    return own.union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _causal_arguments(function: FunctionType) -> Iterator[ast.expr | None]:
    """Yield the argument `is_causal` of each call of torch's attention in a function; None if it is missing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, such as in an interactive session
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and SDPA in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            yield named.get("is_causal", node.args[5] if len(node.args) > 5 else None)


def _value(node: ast.expr | None, module: nn.Module, own_name: tuple[str, ...]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own_name:
        return getattr(module, node.attr, None)
    return None


def _operands(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Return the queries (…, t, k) and keys (…, s, k) of a matmul of two tensors; None for other functions."""
    if func in PRODUCTS and len(args) > 1 and args[0].ndim > 2 and args[1].ndim > 2:
        return args[0], args[1].transpose(-2, -1)
    return None


def _are_scores(queries: Tensor, keys: Tensor, result: Any) -> bool:
    return result.is_floating_point() and result.shape[-2:] == (queries.shape[-2], keys.shape[-2])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _has(args: tuple[Any, ...], tensor: Tensor) -> bool:
    return any(each is tensor for each in args)
