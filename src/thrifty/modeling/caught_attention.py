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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thrifty.core.errors import RefusedError
from thrifty.modeling.attention_cores import HIDDEN, AttentionCore, AttentionSite, call_core, visible_and_bias
from thrifty.modeling.module_surgery import wrap_forward

MATMUL = "@"
SDPA = "scaled_dot_product_attention"
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
SOFTMAX = {torch.softmax, F.softmax, Tensor.softmax}
SCALINGS = {
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__), 1),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__), -1),
}
"""Functions that scale scores by a number, with the exponent of the number."""
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm}
"""Matmuls that add a tensor."""
ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.add_, Tensor.__iadd__, Tensor.__radd__}
HIDING = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_, torch.where, torch.max}
RESHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten, Tensor.flatten, torch.flatten}
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
    """A mode that answers the attention of one module by a core.

    Scores are `scale` · q kᵀ + `bias` until the module's softmax. Scores far below zero are hidden pairs.
    """

    def __init__(self, site: CaughtSite, core: AttentionCore):
        super().__init__()
        self.site, self.core, self.is_done = site, core, False
        self.reason = "it calls neither torch's attention nor a softmax of queries and keys"
        self.queries: Tensor | None = None
        self.keys: Tensor | None = None
        self.scores: Tensor | None = None
        """The latest scores, and the result of the module's operations on them."""
        self.scale = 1.0
        self.bias: Tensor | None = None
        self.mask: Tensor | None = None
        self.weights: Tensor | None = None
        """Result of the softmax, and of the module's operations on it."""
        self.dropout = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self.multi_head(func, *args, **kwargs)
        if self.weights is not None and _has(args, kwargs, self.weights):
            return self.on_weights(func, args, kwargs)
        if self.scores is not None and _has(args, kwargs, self.scores):
            return self.on_scores(func, args, kwargs)
        result = func(*args, **kwargs)
        if (product := score_product(func, args, kwargs)) is not None and _are_scores(product, result):
            self.queries, self.keys, self.scale, self.bias = product
            self.scores = result
        return result

    def on_scores(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the module's operations on the scores to its softmax."""
        scores, result = self.scores, func(*args, **kwargs)
        assert scores is not None
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, result.ndim - 1):
                self.weights, self.mask = result, scores.detach() > HIDDEN
            return result
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape[-2:] != scores.shape[-2:]:
            return result
        other = next((each for each in args if each is not scores), None)
        if func in SCALINGS and _is_number(other):
            factor = float(other) ** SCALINGS[func]
            self.scale, self.bias = self.scale * factor, None if self.bias is None else self.bias * factor
        elif func in ADDITIONS and isinstance(other, Tensor):
            addend = visible_and_bias(other)[1]
            if addend is not None:
                self.bias = addend if self.bias is None else self.bias + addend
        elif func in RESHAPES:
            self.reshape(result.shape[:-2])
        elif func not in HIDING and func not in CONVERSIONS:
            self.reason = f"its scores pass {getattr(func, '__name__', func)}"
            self.scores = None
            return result
        self.scores = result
        return result

    def reshape(self, lead: torch.Size) -> None:
        """Change the dimensions before tokens and channels, as the module does to its scores."""
        assert self.queries is not None and self.keys is not None and self.scores is not None
        before = self.scores.shape[:-2]
        self.queries, self.keys, self.bias = (
            None if each is None else each.expand(*before, *each.shape[-2:]).reshape(*lead, *each.shape[-2:])
            for each in (self.queries, self.keys, self.bias)
        )

    def on_weights(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the matmul of weights and values. Follow dropout and conversions of the weights until then."""
        if (product := value_product(func, args)) is not None:
            return self.attended(*product)
        result = func(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            values = {"p": 0.5, "training": True} | dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
            self.dropout = values["p"] if values["training"] else 0.0
        is_followed = func in (F.dropout, torch.dropout) or func in CONVERSIONS or func in RESHAPES
        if is_followed and isinstance(result, Tensor):
            self.weights = result
        return result

    def attended(self, values: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the attention over values (…, s, k), whose other dimensions may be merged."""
        assert self.queries is not None and self.keys is not None and self.mask is not None
        lead = self.mask.shape[:-2]
        result = self.answer(
            self.queries, self.keys, values.reshape(*lead, *values.shape[-2:]) if values.shape[:-2].numel() == lead.numel()
            else values, self.mask, self.dropout, self.bias, self.scale,
        )  # fmt: skip
        self.weights = self.scores = None
        return finish(
            result.reshape(*values.shape[:-2], *result.shape[-2:])
            if values.shape[:-2].numel() == lead.numel()
            else result
        )

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
        if query.shape[-2] != key.shape[-2] or (self.site.causal and not is_causal and attn_mask is None):
            self.is_done = True
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask, bias = (None, None) if attn_mask is None else visible_and_bias(attn_mask)
        if is_causal and not self.site.causal:
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
        self.is_done = True
        lead = query.shape[:-2]
        if len(lead) > 2:
            key, value = (each.expand(*lead, *each.shape[-2:]) for each in (key, value))
        q, k, v = (with_heads(each) for each in (query, key, value))
        if scale != (usual := q.shape[-1] ** -0.5):
            q = q * (scale / usual)
        mask, bias = (None if each is None else _like_scores(each, lead) for each in (mask, bias))
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
        """Answer a call of nn.MultiheadAttention, for queries (t, b, d) or (t, d). Attention to another sequence is left
        to torch. Otherwise weights are not returned."""
        is_own = query is key and key is value and in_proj_weight is not None and bias_k is None
        if not is_own or add_zero_attn:
            self.is_done = True
            return func(
                query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
                add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
                attn_mask, **others,
            )  # fmt: skip
        x = query if query.ndim == 3 else query[:, None]
        t, b, d = x.shape
        projected = F.linear(x, in_proj_weight, in_proj_bias).view(t, b, 3, num_heads, d // num_heads)
        q, k, v = projected.permute(2, 1, 3, 0, 4)  # (b, h, t, k) each
        mask: Tensor | None = None
        for given, shape in ((attn_mask, (-1, t, t)), (key_padding_mask, (b, 1, t))):
            if given is not None:
                hidden = given if given.dtype == torch.bool else None
                added = (
                    torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -torch.inf)
                    if hidden is not None
                    else given
                )
                added = added.view(shape)
                added = added.view(b, num_heads, t, t) if len(added) == b * num_heads != b else added[:, None]
                mask = added if mask is None else mask + added
        result = self.attend(q, k, v, mask, dropout_p if training else 0.0)
        out = F.linear(result.permute(2, 0, 1, 3).reshape(t, b, d), out_proj_weight, out_proj_bias)
        return (out if query.ndim == 3 else out[:, 0]), None


def with_heads(x: Tensor) -> Tensor:
    """Return queries, keys, values or a mask in four dimensions: (t, k), (b, t, k) or (…, h, t, k) as (b, h, t, k)."""
    if x.ndim > 4:
        return x.flatten(0, -4)
    return x if x.ndim == 4 else x[:, None] if x.ndim == 3 else x[None, None]


def _like_scores(mask: Tensor, lead: torch.Size) -> Tensor:
    """Return a mask or bias (…, t, s) of scores (*lead, t, s) in four dimensions, with one row per example."""
    mask = mask[(None,) * (len(lead) + 2 - mask.ndim)]
    rows = max(1, len(lead) - 1)  # dimensions other than that of the heads
    return with_heads(mask.expand(*lead[:rows], *mask.shape[rows:]) if lead else mask)


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


def _are_scores(product: tuple[Tensor, Tensor, float, Tensor | None], result: Any) -> bool:
    queries, keys, _, _ = product
    is_matrix = isinstance(result, Tensor) and result.is_floating_point()
    return is_matrix and result.shape[-2:] == (queries.shape[-2], keys.shape[-2])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _has(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: Tensor) -> bool:
    return any(each is tensor for each in (*args, *kwargs.values()))
