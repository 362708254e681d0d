"""Map-style datasets of users. Batches depend only on seed and step."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from thrifty.core.batches import Batch, ExampleIndex
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.data.batch_forms import hashed, same_values
from thrifty.data.collation import Collation, seeded_draws
from thrifty.data.data_loading import Collate, DataParts
from thrifty.data.epoch_sampler import HELD_OUT_KEY, EpochSource
from thrifty.data.lazy_attributes import LazyAttributes

FINGERPRINTED = 16
"""Number of examples in a fingerprint. They are spread evenly over the dataset."""


READ_TWICE = 5
"""Number of examples that are read twice to detect random values. They are spread evenly over the dataset."""


class UserDataset:
    """A map-style dataset with its collate function, as `IndexedExamples`. `lazy` are attributes that reads set."""

    def __init__(self, dataset: Any, collate: Collate | None = None, lazy: LazyAttributes | None = None):
        self.dataset, self.lazy = dataset, lazy or LazyAttributes(dataset)
        if not len(dataset):
            raise UsageError("the dataset has no examples", fix="pass a dataset with examples")
        with self.lazy.present():
            first = [self._example(index, "first") for index in range(min(2, len(dataset)))]
            self.collation = Collation(collate, first)
        read_twice = [int(index) for index in np.unique(np.linspace(0, len(dataset) - 1, READ_TWICE).astype(int))]
        pairs = ([self.seeded_fields([index], ["first"]) for _ in range(2)] for index in read_twice)
        self.unrepeated = next(filter(None, (same_values(*pair) for pair in pairs)), "")
        """Name of a part that differs between two reads with the same seeds; empty if all parts are equal."""

    def __len__(self) -> int:
        return len(self.dataset)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self.seeded_fields(indices, [f"{HELD_OUT_KEY}/{index}" for index in indices])

    def seeded_fields(self, indices: Sequence[int] | np.ndarray, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the examples at `indices`. `keys` seed random values, one key per example."""
        with self.lazy.present():
            examples = [self._example(int(index), key) for index, key in zip(indices, keys, strict=True)]
            return self.collation.fields(examples, f"{keys[0]}/{len(keys)}/collate")

    def assembled(self, batch: Batch) -> Any:
        return self.collation.assembled(batch)

    def fingerprint(self) -> str:
        """Return a hash of the number of examples and some examples. If values change between reads, hash the batch
        form instead."""
        digest = hashlib.sha256(f"{type(self.dataset).__qualname__}/{len(self)}".encode())
        if self.unrepeated:
            digest.update(self.collation.form.encode())
            return digest.hexdigest()
        for index in np.linspace(0, len(self) - 1, FINGERPRINTED).astype(int):
            for tensor in self.fields(np.array([index])).values():
                digest.update(hashed(tensor))
        return digest.hexdigest()

    def unrepeated_words(self, name: str) -> str:
        """Describe a part that differs between two reads, or return an empty string."""
        if not self.unrepeated:
            return ""
        kind = type(self.dataset).__name__
        return f"an example of {name} ({kind}) differs in {self.unrepeated!r} when it is read twice"

    def _example(self, index: int, key: str) -> Any:
        try:
            with seeded_draws(key):
                return self.dataset[index]
        except Exception as error:
            if isinstance(error, ThriftyError):
                raise
            raise UsageError(
                f"example {index} of the dataset ({type(self.dataset).__name__}) cannot be read: "
                f"{type(error).__name__}: {error}",
                fix=f"correct dataset[{index}]: all indices from 0 to len(dataset) - 1 must be readable",
            ) from error


class WorkerStart:
    """A user's `worker_init_fn`, which finds the user's dataset in `get_worker_info()`."""

    def __init__(self, function: Callable[[int], Any], dataset: Any):
        self.function, self.dataset = function, dataset

    def __call__(self, number: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # frozen, and torch's is a dataset of batches
        self.function(number)


class UserSource(EpochSource):
    """Training examples of a user's dataset in epochs.

    The user's code may use global random generators. Examples are therefore read in the training thread or in worker
    processes of a DataLoader, never in another thread. A collate function that uses random values is called with whole
    effective batches, so that batches do not depend on the number of ranks.
    """

    contents: UserDataset

    def __init__(self, contents: UserDataset, batch: int, seed: int, parts: DataParts):
        super().__init__(contents, batch, seed)
        self._loading, self.is_shuffled = dict(parts.loading), parts.is_shuffled
        if function := self._loading.get("worker_init_fn"):
            self._loading["worker_init_fn"] = WorkerStart(function, contents.dataset)
        self.notices, self.unrepeatable = parts.notices, contents.unrepeated_words("data")

    @property
    def collation(self) -> Collation:
        return self.contents.collation

    @property
    def in_thread(self) -> bool:
        return False

    @property
    def loading(self) -> Mapping[str, Any]:
        return self._loading

    def rows(self, step: int, start: int, stop: int) -> Batch:
        if self.contents.collation.draws and stop - start < self.batch:
            return super().rows(step, 0, self.batch).rows(start, stop)
        return super().rows(step, start, stop)

    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        return self.contents.seeded_fields(chosen, [f"{self.seed}/{number}" for number in numbers])

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self.contents), self.contents.fingerprint())
