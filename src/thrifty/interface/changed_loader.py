"""Techniques applied to a DataLoader or dataset of a user's own training loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

from thrifty.core.batches import Batch, BatchSource, ExampleIndex, ExampleSubset, ResizedSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.technique import Technique
from thrifty.data.data_loading import dataset_of
from thrifty.data.user_dataset import UserDataset

REBUILT = (
    "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
    "persistent_workers", "collate_fn", "generator",
)  # fmt: skip
"""DataLoader arguments that a rebuilt loader copies."""


class LoaderBatches(BatchSource):
    """A user's data as a batch source: the current batch, and examples by index."""

    def __init__(self, data: Any):
        self.data, self.batch = data, getattr(getattr(data, "batch_sampler", data), "batch_size", None) or 0
        self.current = Batch({}, torch.empty(0))
        self.choice: ExampleSubset | None = None

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.current.rows(start, stop)

    def size(self, step: int) -> int:
        return len(self.current)

    def example_index(self) -> ExampleIndex:
        parts = dataset_of(self.data)
        if not parts.is_map_style:
            return super().example_index()
        contents = UserDataset(parts.dataset, parts.collate)
        return ExampleIndex(len(contents), contents.fingerprint())

    def subset(self, choice: ExampleSubset) -> BatchSource:
        changed = copy(self)
        changed.choice = choice
        return changed


class ChangedLoader:
    """A loader whose batches a technique changes. Batches are numbered over all epochs.

    `state_dict` contains the batch number, and the loader's state if the loader has one. If this state is not loaded, a
    resumed loop starts at batch 0.
    """

    def __init__(self, loader: Iterable[Any], technique: Technique, read: LoaderBatches, changed: BatchSource):
        self.loader, self.technique, self.batches = loader, technique, 0
        self._read, self._changed = read, changed

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            number = self.batches
            self.batches += 1
            yield self._change(batch, number)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r}, {self.technique!r})"

    def state_dict(self) -> dict[str, Any]:
        inner = {"loader": self.loader.state_dict()} if hasattr(self.loader, "state_dict") else {}
        return {"batches": self.batches, **inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = state["batches"]
        if "loader" in state:
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]

    def _change(self, batch: Any, number: int) -> Any:
        tensors: dict[str, Tensor] = {}
        _map_tensors(batch, lambda name, tensor: tensors.setdefault(name, tensor))
        rows = {name: tensor for name, tensor in tensors.items() if tensor.ndim}
        count = len(next(iter(rows.values()), ()))
        if any(len(tensor) != count for tensor in rows.values()):
            shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in rows.items())
            raise RefusedError(
                f"{self.technique.name}: the tensors of a batch must have the same number of rows: {shapes}",
                fix="return one row per example from the loader, for example one label per text",
            )
        self._read.current = Batch(rows, torch.full((count,), 1 / max(count, 1)))
        changed = self._changed.at(number).fields
        return _map_tensors(batch, lambda name, tensor: changed.get(name, tensor))


class RampSampler:
    """Batches of growing size from a sampler. Batches are numbered over all epochs."""

    def __init__(self, sampler: Iterable[int], sizes: BatchSource, drop_last: bool):
        self.sampler, self.sizes, self.drop_last, self.batches = sampler, sizes, drop_last, 0

    def __iter__(self) -> Iterator[list[int]]:
        chosen: list[int] = []
        for index in self.sampler:
            chosen.append(index)
            if len(chosen) == self.sizes.size(self.batches):
                self.batches += 1
                yield chosen
                chosen = []
        if chosen and not self.drop_last:
            self.batches += 1
            yield chosen

    def __len__(self) -> int:
        """Number of batches in the next epoch."""
        left, number = len(self.sampler), self.batches  # type: ignore[arg-type]
        while left >= (size := self.sizes.size(number)):
            left, number = left - size, number + 1
        return number - self.batches + (left > 0 and not self.drop_last)


class RampLoader(DataLoader):
    """A loader with a `RampSampler`. It counts the batches that the loop received, since workers prefetch batches.

    `state_dict` contains this number. If it is not loaded, a resumed loop starts at batch 0.
    """

    batches = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.batch_sampler.batches = self.batches  # type: ignore[union-attr]
        for batch in super().__iter__():
            self.batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches = self.batch_sampler.batches = state["batches"]  # type: ignore[union-attr]


def change_data(data: Any, technique: Technique) -> Any:
    """Return the loader or dataset with a technique's changes applied to its batches.

    Raises UsageError if `data` is neither a loader nor a dataset, and RefusedError if the technique does not support
    it.
    """
    each = data
    while isinstance(each, ChangedLoader):
        if each.technique.claims & technique.claims or each.technique.name == technique.name:
            raise UsageError(
                f"{each.technique.name} and {technique.name} change the same part of a batch", fix="apply one of them"
            )
        each = each.loader
    read = LoaderBatches(data)
    changed = technique.batches(read)
    if isinstance(changed, ResizedSource):
        return _rebuilt(data, technique, lambda batches: RampSampler(batches.sampler, changed, batches.drop_last))
    if isinstance(changed, LoaderBatches) and changed.choice is not None:
        chosen = Subset(dataset_of(data)[0], changed.choice.kept.tolist())
        if not isinstance(data, DataLoader):
            return chosen
        batches: Any = data.batch_sampler
        settings = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
        shuffle = not isinstance(batches.sampler, SequentialSampler)
        return DataLoader(chosen, shuffle=shuffle, **settings, **_settings(data))
    if isinstance(data, Sequence) or not isinstance(data, Iterable):
        raise UsageError(
            f"{technique.name} changes batches, but a {type(data).__name__!r} returns single examples",
            fix=f"loader = thrifty.apply(DataLoader(dataset, batch_size=…), {technique.name!r})",
        )
    return ChangedLoader(data, technique, read, changed)


def _rebuilt(data: Any, technique: Technique, sampler: Callable[[BatchSampler], RampSampler]) -> DataLoader:
    is_plain = type(data) is DataLoader and type(data.batch_sampler) is BatchSampler
    if not is_plain or isinstance(data.dataset, IterableDataset):
        raise UsageError(
            f"{technique.name} changes the batch size, which requires a DataLoader with a batch_size",
            fix=f"thrifty.apply(DataLoader(dataset, batch_size=…), {technique.name!r})",
        )
    return RampLoader(data.dataset, batch_sampler=sampler(data.batch_sampler), **_settings(data))  # type: ignore[arg-type]


def _settings(loader: DataLoader) -> dict[str, Any]:
    return {name: getattr(loader, name) for name in REBUILT}


def _map_tensors(value: Any, function: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return a copy of a nested batch with `function` applied to each tensor and the tensor's name."""
    if isinstance(value, Tensor):
        return function(name or "batch", value)
    if isinstance(value, MutableMapping):
        changed = copy(value)
        for key, item in value.items():
            changed[key] = _map_tensors(item, function, f"{name}.{key}".strip("."))
        return changed
    if isinstance(value, list | tuple):
        items = [_map_tensors(item, function, f"{name}.{place}".strip(".")) for place, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
