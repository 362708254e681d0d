"""Signatures of block calls from their operations on fake tensors. Equal signatures mean equal computations."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from thrifty.core.tensor_tracing import StepTrace


class CallSignature(StepTrace):
    """Trace of a call: operations, their inputs, live bytes after each operation, saved tensors, and the autograd
    graph."""

    def __init__(self, *known: Tensor):
        self.steps: list[Hashable] = []
        self._numbers: dict[int, int] = {}
        self._numbering = count()
        super().__init__(*known)

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = tuple(self._likeness(leaf) for leaf in tree_leaves((args, kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.steps.append((func, inputs, self.now))
        return result

    def note_saved(self, tensor: Tensor) -> None:
        self.steps.append(("saved", self._likeness(tensor)))

    def kind(self, result: Any) -> Hashable:
        """Return a key that is equal for calls with the same operations and the same kind of result."""
        outputs = [self._likeness(leaf) for leaf in tree_leaves(result)]
        nodes = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        return *self.steps, *outputs, *_graph_nodes(nodes)

    def _likeness(self, value: Any) -> Hashable:
        if not isinstance(value, Tensor):
            return value if isinstance(value, Hashable) else repr(value)
        kind = value.layout, value.dtype, value.device, value.requires_grad, value.shape
        if value.layout is not torch.strided:
            return kind
        return *kind, value.stride(), value.storage_offset(), self._numbers.get(value.untyped_storage()._cdata)

    def _follow(self, storage: torch.UntypedStorage, own: int) -> None:
        self._numbers.setdefault(storage._cdata, next(self._numbering))
        super()._follow(storage, own)

    def _forget(self, key: int, own: int) -> None:
        self._numbers.pop(key, None)
        super()._forget(key, own)


def _graph_nodes(ends: Sequence[Any]) -> Iterator[Hashable]:
    """Yield the kind and the connections of each node of an autograd graph."""
    nodes = list(dict.fromkeys(ends))
    places = {node: place for place, node in enumerate(nodes)}
    for node in nodes:  # the loop appends to the list
        following = [(after, output) for after, output in node.next_functions if after is not None]
        for after, _ in following:
            if after not in places:
                places[after] = len(nodes)
                nodes.append(after)
        yield node.name(), tuple((places[after], output) for after, output in following)
