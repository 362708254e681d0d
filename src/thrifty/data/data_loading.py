"""Datasets of DataLoaders and of other sources of examples, and the options for reading them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from thrifty.core.errors import RefusedError, UsageError

Collate = Callable[[list[Any]], Any]
LOADING = ("num_workers", "prefetch_factor", "pin_memory", "timeout", "worker_init_fn")
"""DataLoader settings that change how examples are read, but not which examples are read."""


class DataParts(NamedTuple):
    """A dataset and the settings of its DataLoader."""

    dataset: Any
    collate: Collate | None = None
    batch: int | None = None
    loading: Mapping[str, Any] = {}
    """Settings of the DataLoader that reads the batches; empty if no DataLoader is used."""
    is_shuffled: bool = True
    notices: tuple[str, ...] = ()

    @property
    def is_map_style(self) -> bool:
        is_iterable = isinstance(self.dataset, IterableDataset)  # torch's Dataset has a __getitem__ that only raises
        return hasattr(self.dataset, "__getitem__") and hasattr(self.dataset, "__len__") and not is_iterable


def dataset_of(data: Any) -> DataParts:
    """Return the dataset and settings of a DataLoader; for a dataset, return it with default settings.

    A tuple or dictionary of arrays or tensors is a dataset of columns. Raises RefusedError for a custom sampler, and
    UsageError for an object without examples.
    """
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, Mapping) and data and all(isinstance(each, np.ndarray | Tensor) for each in data.values()):
        return DataParts(Columns(data))
    if isinstance(data, Mapping):
        splits = ", ".join(map(str, data))
        raise UsageError(
            f"data is a {type(data).__name__} with the keys {splits or '(none)'}, not a dataset",
            fix="pass two of the values: data=splits['train'], held_out=splits['test']",
        )
    if isinstance(data, tuple) and data and all(isinstance(each, np.ndarray | Tensor) for each in data):
        return DataParts(Columns(data))
    if isinstance(data, Iterator):
        raise UsageError(
            f"data is a {type(data).__name__}, which can be read once only",
            fix="pass a dataset; or a list of examples; or an IterableDataset whose __iter__ returns a new iterator",
        )
    if type(data).__module__.partition(".")[0] == "pandas":
        raise UsageError("data is a pandas object, not a dataset", fix='pass the rows: data=frame.to_dict("records")')
    if isinstance(data, str) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise UsageError(f"data is a {type(data).__name__}, not a dataset", fix="pass a map-style or iterable dataset")
    if getattr(data, "format", {"type": ""})["type"] is None if isinstance(getattr(data, "format", None), dict) else 0:
        data = data.with_format("torch")  # without this, lists of a datasets.Dataset are not collated into rows
    return DataParts(data)


def _of_loader(loader: DataLoader[Any]) -> DataParts:
    inner = dataset_of(loader.dataset)
    if loader.batch_size is None and loader.batch_sampler is None:
        raise RefusedError(
            "the DataLoader has batch_size=None: its dataset returns whole batches, which cannot be divided or resized",
            fix="pass a dataset of single examples; or a DataLoader with batch_size",
        )
    loading = {name: getattr(loader, name) for name in LOADING if getattr(loader, name, None)}
    if not loading.keys() & {"num_workers", "pin_memory"}:
        loading = {}
    if not inner.is_map_style:
        return inner._replace(
            collate=loader.collate_fn,
            batch=loader.batch_size,
            loading={},
            notices=("the training process reads the iterable dataset, so the DataLoader's workers are not used",)
            if loader.num_workers
            else (),
        )
    batches = loader.batch_sampler  # a loader that was built with it has another `sampler`, and no `batch_size`
    sampler = batches.sampler if type(batches) is BatchSampler else loader.sampler
    is_random = type(sampler) is RandomSampler
    is_whole = type(sampler) is SequentialSampler or (is_random and not sampler.replacement)
    plain = is_whole and len(sampler) == len(loader.dataset)
    if not plain or type(batches) is not BatchSampler:
        name = type(batches if plain else sampler).__name__
        raise RefusedError(
            f"the DataLoader has a sampler of its own ({name}), but a run can resume only if the order of examples is "
            "a function of seed and step",
            fix="pass torch.utils.data.Subset(loader.dataset, loader.batch_sampler.sampler.indices)"
            if isinstance(sampler, SubsetRandomSampler)
            else "pass the dataset without its sampler; return weights of examples as the second result of the loss",
        )
    notices = []
    if not is_random:
        notices.append("the DataLoader has shuffle=False: each epoch reads examples in the order of the dataset")
    if is_random and sampler.generator is not None:
        notices.append("the DataLoader's generator is not used: the run's seed determines the order of examples")
    if loader.multiprocessing_context and loader.multiprocessing_context.get_start_method() != "fork":
        notices.append("the DataLoader's multiprocessing_context is not used: its workers are forked")
    if batches.drop_last and len(loader.dataset) % batches.batch_size:
        notices.append(
            "the DataLoader has drop_last=True: no batch is dropped, because batches continue into the next epoch"
        )
    return inner._replace(
        collate=loader.collate_fn,
        batch=batches.batch_size,
        loading=loading,
        is_shuffled=is_random,
        notices=tuple(notices),
    )


class Columns(Dataset[Any]):
    """A dataset of columns (arrays or tensors). Row i of each column belongs to example i.

    Raises UsageError for columns with unequal numbers of rows.
    """

    def __init__(self, columns: Mapping[str, Any] | tuple[Any, ...]):
        self.columns = columns
        lengths = {len(each) for each in (columns.values() if isinstance(columns, Mapping) else columns)}
        if len(lengths) > 1:
            raise UsageError(
                f"columns have {' and '.join(map(str, sorted(lengths)))} rows",
                fix="pass columns with the same number of rows",
            )
        self.length = lengths.pop()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, Mapping):
            return {name: each[index] for name, each in self.columns.items()}
        return tuple(each[index] for each in self.columns)
