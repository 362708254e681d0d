"""Conversion of batches of any form to named tensors, and back."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrifty.core.errors import UsageError

MOST_PARTS = 1000
"""Number of parts of a container that are searched for arrays."""
SHARED = 1 << 26
"""Bytes from which copies of a dataset share an array."""
Put = Callable[[Mapping[str, Tensor]], Any]
"""Function that assembles a batch from its named tensors."""


def take_apart(batch: Any) -> tuple[dict[str, Tensor], str, Put]:
    """Return the tensors of a batch by dotted path, a description of its form, and a function that reassembles it.

    A batch consists of tensors or numpy arrays, nested in mappings, sequences, named tuples and dataclasses. None and
    booleans are part of the form. Raises UsageError for anything else.
    """
    leaves: dict[str, Tensor] = {}
    form, put = _take_apart(batch, "", leaves)
    return leaves, form, put


def _take_apart(value: Any, path: str, leaves: dict[str, Tensor]) -> tuple[str, Put]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    kind = type(value)
    if isinstance(value, Tensor):
        leaves[path or "batch"] = value
        return "tensor", lambda tensors: tensors[path or "batch"]
    if value is None or isinstance(value, bool):
        return repr(value), lambda tensors: value
    if is_dataclass(value):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        assemble = lambda parts: _with_fields(kind, parts)  # noqa: E731
    elif isinstance(value, Mapping):
        parts = dict(value)
        assemble = (lambda parts: parts) if kind is dict else lambda parts: kind(parts)
    elif isinstance(value, tuple | list):
        parts = {str(index): each for index, each in enumerate(value)}
        is_named = hasattr(value, "_fields")
        assemble = lambda parts: kind(*parts.values()) if is_named else kind(parts.values())  # noqa: E731
    else:
        shown = f" ({value!r:.40})" if isinstance(value, str | int | float) else ""
        raise UsageError(
            f"part {path or 'batch'!r} of a batch is a {kind.__name__}{shown}, which has no row for each example",
            fix="leave the part out; or pass collate=, a function that returns tensors with one row per example",
        )
    inner = {key: _take_apart(each, f"{path}.{key}".strip("."), leaves) for key, each in parts.items()}
    puts = {key: put for key, (_, put) in inner.items()}
    form = f"{kind.__name__}({', '.join(f'{key}: {form}' for key, (form, _) in inner.items())})"
    return form, lambda tensors: assemble({key: put(tensors) for key, put in puts.items()})


def _with_fields(kind: type, parts: Mapping[str, Any]) -> Any:
    """Return a dataclass object with the fields `parts`. The constructor is not called again, because the values come
    from an object that it has made."""
    instance = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(instance, name, value)
    return instance


def same_values(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor that differs in any bit between the mappings; empty if all tensors are equal."""
    for name in one.keys() | other.keys():
        if name not in one or name not in other or hashed(one[name]) != hashed(other[name]):
            return name
    return ""


def hashed(tensor: Tensor) -> bytes:
    """Return the type, shape and bits of a tensor as bytes for a hash."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
    return repr((tensor.dtype, tuple(tensor.shape))).encode() + (bits.numpy().tobytes() if tensor.numel() else b"")


def deep_copy(value: Any) -> Any | None:
    """Return a deep copy, or None for objects that cannot be copied, such as an open file. Arrays of more than `SHARED`
    bytes and arrays in files are not copied, because they are the examples themselves, not a position among them."""
    try:
        return copy.deepcopy(value, {id(array): array for array in _large_arrays(value, set())})
    except Exception:  # a user's class may raise anything
        return None


def _large_arrays(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the large arrays and tensors in the attributes and containers of an object."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray | Tensor):
        if isinstance(value, np.memmap) or value.nbytes > SHARED:
            yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    own = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type | ModuleType) else ()
    for part in (*own, *islice(parts, MOST_PARTS)):
        yield from _large_arrays(part, seen)
