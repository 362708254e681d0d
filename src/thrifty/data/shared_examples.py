"""Held-out examples that are also training examples, which makes the held-out loss too low."""

from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Subset

IndicesBySource = dict[int, list[range | np.ndarray]]
"""Indices of examples by the identity of their dataset. For lists, the identities of their objects, under the key 0."""


def caution_on_shared(data: Any, held_out: Any) -> tuple[str, ...]:
    """Return a caution if two datasets share examples. It is known for lists with the same objects, and for a dataset,
    its subsets and their concatenations. Examples are not read."""
    with suppress(Exception):  # a user's dataset may have indices of any kind
        held, trained = _indices(held_out), _indices(data)
        shared = sum(_shared(held[source], trained[source]) for source in held.keys() & trained.keys())
        total = sum(len(part) for parts in held.values() for part in parts)
        if shared:
            found = f"{shared:,} of {total:,} held-out examples are training examples too"
            return (f"{found}, so the held-out loss is too low",)
    return ()


def _shared(held: list[range | np.ndarray], trained: list[range | np.ndarray]) -> int:
    """Return how many held-out examples of a dataset are training examples. A range is the whole dataset."""
    if any(isinstance(part, range) for part in trained):
        return sum(map(len, held))
    chosen = np.unique(np.concatenate(trained))
    return sum(len(chosen) if isinstance(part, range) else int(np.isin(part, chosen).sum()) for part in held)


def _indices(dataset: Any) -> IndicesBySource:
    if isinstance(dataset, DataLoader):
        return _indices(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        merged: IndicesBySource = {}
        for part in dataset.datasets:
            for source, indices in _indices(part).items():
                merged.setdefault(source, []).extend(indices)
        return merged
    if isinstance(dataset, list):
        return {0: [np.fromiter(map(id, dataset), np.int64, len(dataset))]}
    if isinstance(dataset, Subset):
        return _indices_of_subset(dataset)
    return {} if isinstance(dataset, tuple | dict) else {id(dataset): [range(len(dataset))]}


def _indices_of_subset(dataset: Subset[Any]) -> IndicesBySource:
    whole, chosen = dataset.dataset, np.asarray(dataset.indices)
    while isinstance(whole, Subset):
        whole, chosen = whole.dataset, np.asarray(whole.indices)[chosen]
    if isinstance(whole, ConcatDataset) or chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        return {}
    if isinstance(whole, list):
        return _indices([whole[index] for index in chosen])
    return {id(whole): [np.where(chosen < 0, chosen + len(whole), chosen) if (chosen < 0).any() else chosen]}
