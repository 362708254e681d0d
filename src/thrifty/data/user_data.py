"""Datasets of the user's own: any map-style dataset as a pure function of (seed, step)."""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from thrifty.core.batches import Batch, ExampleIndex
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.randomness import seed_of
from thrifty.data.epoch_sampler import HELD_OUT_KEY, EpochSource, HeldOutExamples
from thrifty.data.run_data import ExamplePreview

Collate = Callable[[list[Any]], Any]
FINGERPRINTED = 16
"""Examples, spread over the dataset, whose values enter its fingerprint."""


@contextmanager
def seeded_draws(key: str) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch's processor by a key, and restore them afterwards."""
    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    seed = seed_of(key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.random.default_generator.manual_seed(seed % 2**63)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])


class UserDataset:
    """A map-style dataset with its collate function, as `IndexedExamples`.

    A batch may be of any form: a tensor, or tensors in dictionaries and sequences. Its leaves are the fields of a
    `Batch`; `structure` puts them together again. Raises UsageError for a leaf that has no row for each example.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None):
        if not len(dataset):
            raise UsageError("the dataset has no examples", fix="give one with some")
        self.dataset, self.collate = dataset, collate or default_collate
        first = self._batch([0], ["first"])
        self.structure: TreeSpec = tree_flatten(first)[1]
        self.names = [str(place) for place in range(self.structure.num_leaves)]
        self.is_repeatable = _same(first, self._batch([0], ["first"]))
        """False if an example read twice with the same generators is not the same."""

    def __len__(self) -> int:
        return len(self.dataset)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        return self.seeded_fields(indices, [f"{HELD_OUT_KEY}/{index}" for index in indices])

    def seeded_fields(self, indices: Sequence[int] | np.ndarray, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the examples at these places, whatever they draw being drawn from their keys."""
        leaves, structure = tree_flatten(self._batch(indices, keys))
        if structure != self.structure:
            raise UsageError(
                f"examples of the dataset differ in form: {structure} after {self.structure}",
                fix="give every example the same keys, or a collate function that does",
            )
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(indices):
                what = f"of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise UsageError(
                    f"part {place} of a batch of {len(indices)} examples is {what}, and has no row for each example",
                    fix="let the collate function return tensors with one row per example",
                )
        return dict(zip(self.names, leaves, strict=True))

    def assembled(self, batch: Batch) -> Any:
        """Return a batch in the form that the collate function gave it."""
        return tree_unflatten([batch[name] for name in self.names], self.structure)

    def fingerprint(self) -> str:
        """Return a hash of the number of examples and of some of them."""
        digest = hashlib.sha256(f"{type(self.dataset).__qualname__}/{len(self)}".encode())
        for index in np.linspace(0, len(self) - 1, FINGERPRINTED).astype(int):
            for leaf in self.fields(np.array([index])).values():
                digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
                digest.update(leaf.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _batch(self, indices: Sequence[int] | np.ndarray, keys: Sequence[str]) -> Any:
        examples = []
        for index, key in zip(indices, keys, strict=True):
            with seeded_draws(key):
                examples.append(self.dataset[int(index)])
        with seeded_draws("/".join([keys[0], str(len(keys)), "collate"])):
            return self.collate(examples)


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tree_flatten(one)[0], tree_flatten(other)[0], strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class UserSource(EpochSource):
    """Training examples of a user's dataset in epochs. Their code draws from global generators, so that they are read
    in the training thread or in processes, never beside it."""

    contents: UserDataset

    @property
    def in_thread(self) -> bool:
        return False

    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        return self.contents.seeded_fields(chosen, [f"{self.seed}/{number}" for number in numbers])

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self.contents), self.contents.fingerprint())


def dataset_of(data: Any) -> tuple[Any, Collate | None, int | None]:
    """Return the dataset of a DataLoader, its collate function and its batch size, or a dataset as it is.

    Raises UsageError for what is neither, and RefusedError for a sampler of the user's own or examples without numbers.
    """
    if isinstance(data, DataLoader):
        if type(data.sampler) not in (SequentialSampler, RandomSampler) or type(data.batch_sampler) is not BatchSampler:
            raise RefusedError(
                f"the DataLoader has a sampler of its own ({type(data.sampler).__name__}), and the order of examples "
                "must be a function of seed and step for a run to resume",
                fix="pass the dataset without its sampler; unequal weights are the loss's second result",
            )
        return data.dataset, data.collate_fn, data.batch_size
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise RefusedError(
            f"a {type(data).__name__} has no examples that can be read by number",
            fix="pass a map-style dataset with __len__ and __getitem__",
        )
    return data, None, None


@dataclass(frozen=True)
class UserModelSpec:
    """Requirements of a user's own data on a model: none, since only their loss calls it."""


@dataclass(frozen=True)
class UserData:
    """See `run_data.RunData`."""

    contents: UserDataset
    train: UserSource
    held_out: HeldOutExamples
    identity: Mapping[str, str]

    ends = UserModelSpec()
    example_unit = 1
    facts: Mapping[str, Any] = None  # type: ignore[assignment]

    def description(self) -> dict[str, Any]:
        return {"train_examples": len(self.contents), "held_out_examples": len(self.held_out)}

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        return [ExamplePreview(number, text=repr(self.contents.dataset[number])[:500]) for number in numbers]

    def pictures(self, inputs: Tensor) -> list[str]:
        raise RefusedError("examples of a dataset of your own have no pictures here", fix="draw them in your code")

    def metadata(self) -> dict[str, str]:
        return {}

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        if before.get("structure") != self.identity["structure"]:
            raise UsageError(
                f"batches have another form than in {old}: {self.identity['structure']}",
                fix="start a new run",
            )


def open_user_data(data: Any, held_out: Any, batch: int, seed: int, collate: Collate | None = None) -> UserData:
    """Open datasets, or DataLoaders, of the user's own. Raises UsageError where they are none."""
    dataset, own_collate, _ = dataset_of(data)
    judged, judged_collate, _ = dataset_of(held_out)
    train = UserDataset(dataset, collate or own_collate)
    other = UserDataset(judged, collate or judged_collate or own_collate)
    if other.structure != train.structure:
        raise UsageError(
            f"held-out batches have the form {other.structure}, and those of training {train.structure}",
            fix="pass datasets whose examples have the same parts",
        )
    if len(train) < batch:
        raise UsageError(
            f"the dataset has {len(train)} examples, fewer than one batch of {batch}", fix=f"batch={len(train)}"
        )
    identity = {"data": train.fingerprint(), "held_out": other.fingerprint(), "structure": str(train.structure)}
    return UserData(train, UserSource(train, batch, seed), HeldOutExamples(other), identity, {"unit": "examples"})
