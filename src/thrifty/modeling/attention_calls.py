"""Which modules call attention, and how, read from their code before they run."""

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

MATMUL = "@"
SDPA = "scaled_dot_product_attention"
LOOKUP = "ALL_ATTENTION_FUNCTIONS"
"""Table of transformers in which its models look up their attention function."""
CROSS = re.compile(r"cross_?att|encoder_attn|encdec|(^|\.)cross(\.| |$)")
"""Names, in lower case, of attention to another sequence."""
OTHER_SEQUENCE = {"memory", "context", "encoder_hidden_states", "key_value_states", "source"}
"""Names of required inputs that are another sequence."""


def calls_attention(module: nn.Module) -> bool:
    """Return True if the module's own code, but not a child, calls attention: torch's function, or a softmax and a
    matmul."""
    return _calls_attention(type(module))


def has_own_softmax(module: nn.Module) -> bool:
    """Return True if a module that calls attention does it by a softmax and matmuls only."""
    return not isinstance(module, nn.MultiheadAttention) and SDPA not in _used_names(type(module))


@cache
def looks_up_function(kind: type) -> bool:
    """Return True if the forward function of a class, or of a parent that it calls, looks up its attention in the table
    of transformers."""
    used = _used_names(kind) if hasattr(kind, "forward") else frozenset()
    return LOOKUP in used or ("super" in used and any(map(looks_up_function, kind.__bases__)))


@cache
def _calls_attention(kind: type[nn.Module]) -> bool:
    if issubclass(kind, nn.MultiheadAttention):
        return True
    if kind.__module__.startswith("torch."):
        return False
    used = _used_names(kind)
    has_product = not used.isdisjoint({"matmul", "bmm", "einsum", MATMUL})
    return SDPA in used or ("softmax" in used and has_product)


@cache
def _used_names(kind: type[nn.Module]) -> frozenset[str]:
    return frozenset(name for function in _reachable(kind) for name in _names(function.__code__))


def attends_to_other(model: nn.Module, name: str) -> bool:
    """Return True if an attention module attends to another sequence, judging by its name, its inputs, or by the code
    of its parent, which passes other keys than queries."""
    module = model.get_submodule(name)
    if CROSS.search(f"{name} {type(module).__name__}".lower()):
        return True
    inputs = inspect.signature(type(module).forward).parameters.values()
    if any(each.name in OTHER_SEQUENCE and each.default is each.empty for each in inputs):
        return True
    parent, _, attribute = name.rpartition(".")
    calls = [
        node
        for function in _reachable(type(model.get_submodule(parent)))
        for node in _calls(function)
        if getattr(node.func, "attr", None) == attribute
    ]
    return isinstance(module, nn.MultiheadAttention) and any(map(_passes_other_keys, calls))


def _passes_other_keys(call: ast.Call) -> bool:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    query, key = (
        named.get(word, call.args[at] if len(call.args) > at else None) for at, word in enumerate(("query", "key"))
    )
    return query is not None and key is not None and ast.dump(query) != ast.dump(key)


def adds_keys(module: nn.Module) -> bool:
    """Return True for an nn.MultiheadAttention with keys of another width, or with more keys than tokens."""
    return isinstance(module, nn.MultiheadAttention) and (
        module.add_zero_attn or module.bias_k is not None or module.in_proj_weight is None
    )


def is_causal(module: nn.Module) -> bool:
    """Return True if the module's code calls torch's attention with `is_causal=True`, as a constant or as an attribute
    of the module, and in no other way."""
    values = {
        _value(node, module, function.__code__.co_varnames[:1])
        for function in _reachable(type(module))
        for node in _causal_arguments(function)
    }
    return values == {True}


def _reachable(kind: type[nn.Module]) -> Iterator[FunctionType]:
    """Yield the forward function of a class, and the methods and functions of its file that this function calls."""
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
    for node in _calls(function):
        if SDPA in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            yield named.get("is_causal", node.args[5] if len(node.args) > 5 else None)


def _calls(function: FunctionType) -> Iterator[ast.Call]:
    """Yield the calls in the source of a function. Without source, as in an interactive session, there are none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _value(node: ast.expr | None, module: nn.Module, own_name: tuple[str, ...]) -> bool | None:
    value: Any = None
    if node is None:
        value = False
    elif isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own_name:
        value = getattr(module, node.attr, None)
    return value if isinstance(value, bool) else None
