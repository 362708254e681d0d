"""Attributes that datasets set when they are read, such as an opened file.

Forked worker processes share the position in a file that is open in this process, so they would return wrong examples,
and an opened dataset cannot be sent to other processes. So such attributes are on a dataset only while this process
reads it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset

OTHERS = (Tensor, nn.Module, ModuleType, FunctionType, MethodType, type)
"""Types of objects that are no part of a dataset."""
PACKAGES = ("datasets", "numpy", "pandas", "pyarrow", "tokenizers", "transformers")
"""Packages whose objects several processes can read at once."""
PLAIN = (bool, int, float, complex, str, bytes, np.generic, Tensor)


class LazyAttributes:
    """Attributes of datasets, and of objects in their attributes, that a read sets from None, or adds, or fills if they
    are an empty dict. Plain data, such as counts and arrays, are no such attributes.
    """

    def __init__(self, *datasets: Any):
        self.objects = _parts(datasets)
        self.process, self.kept = os.getpid(), [dict[str, Any]() for _ in self.objects]

    @contextmanager
    def present(self) -> Iterator[None]:
        """Set the attributes of earlier reads inside the context. After it, they are as before."""
        if self.process != os.getpid():  # a worker opens its own files
            self.process, self.kept = os.getpid(), [{} for _ in self.objects]
        before = [dict(vars(each)) for each in self.objects]
        for each, kept in zip(self.objects, self.kept, strict=True):
            for name, value in [*vars(each).items()]:
                if value is None or _is_empty(value):
                    vars(each)[name] = kept.get(name, None if value is None else {})
            vars(each).update({name: value for name, value in kept.items() if name not in vars(each)})
        try:
            yield
        finally:
            for each, kept, was in zip(self.objects, self.kept, before, strict=True):
                _put_back(vars(each), kept, was)


def _put_back(attributes: dict[str, Any], kept: dict[str, Any], was: dict[str, Any]) -> None:
    """Move lazy attributes to `kept`, and set them as they were."""
    for name, value in [*attributes.items()]:
        old = was.get(name)
        if old is not None and not _is_empty(old):
            continue
        if not _is_plain(value):
            kept[name] = attributes.pop(name)
            attributes |= {name: old} if name in was else {}
        elif old is not None and value is not old:
            old.update(value)
            attributes[name] = old


def _is_empty(value: Any) -> bool:
    return type(value) is dict and not value


def _is_plain(value: Any) -> bool:
    """Return True for data that other processes can use and receive. An array in a file would be sent as a whole."""
    if isinstance(value, dict | list | tuple | set):
        return all(map(_is_plain, islice(value.values() if isinstance(value, dict) else value, 1)))
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.memmap)
    return is_array or value is None or isinstance(value, PLAIN)


def _parts(datasets: tuple[Any, ...]) -> list[Any]:
    """Return the datasets and the objects in their attributes that have attributes of their own."""
    waiting, parts = [*datasets], dict[int, Any]()
    while waiting:
        each = waiting.pop()
        is_other = isinstance(each, OTHERS) or type(each).__module__.partition(".")[0] in PACKAGES
        if id(each) in parts or is_other or not hasattr(each, "__dict__"):
            continue
        parts[id(each)] = each
        for value in vars(each).values():
            is_list = isinstance(value, list | tuple) and value and isinstance(value[0], Dataset)  # as in ConcatDataset
            waiting += value if is_list else [value]
    return [*parts.values()]
