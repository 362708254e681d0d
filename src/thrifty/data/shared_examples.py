"""Held-out examples that are also training examples, which makes the held-out loss too low."""

from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Subset


def caution_on_shared(data: Any, held_out: Any) -> tuple[str, ...]:
    """Return a caution if two datasets share examples. It is known for lists with the same objects, and for a dataset,
    its subsets and their concatenations. Examples are not read."""
    held, trained = _places(held_out), _places(data)
    is_shared = np.zeros(len(held), dtype=bool)
    for source in np.unique(held[:, 0]):
        of_source = held[:, 0] == source
        is_shared[of_source] = np.isin(held[of_source, 1], trained[trained[:, 0] == source, 1])
    shared = int(is_shared.sum())
    text = f"{shared:,} of {len(held):,} held-out examples are training examples too, so the held-out loss is too low"
    return (text,) if shared else ()


def _places(dataset: Any) -> np.ndarray:
    """Return for each example (n, 2) the identity of its dataset and its index there; for an object in a list, 0 and
    the identity of the object; no rows for data whose examples have no indices."""
    if isinstance(dataset, DataLoader):
        return _places(dataset.dataset)
    if isinstance(dataset, Subset):
        whole, indices = dataset.dataset, np.asarray(dataset.indices, dtype=np.int64)
        return _places(whole)[indices] if isinstance(whole, Subset | ConcatDataset | list) else _of(whole, indices)
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_places(part) for part in dataset.datasets])
    if isinstance(dataset, list):
        return np.array([(0, id(example)) for example in dataset], dtype=np.int64).reshape(-1, 2)
    is_indexed = (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") and not isinstance(dataset, dict | tuple)
    )
    return _of(dataset, np.arange(len(dataset) if is_indexed else 0))


def _of(dataset: Any, indices: np.ndarray) -> np.ndarray:
    return np.stack([np.full(len(indices), id(dataset), dtype=np.int64), indices], axis=1)
