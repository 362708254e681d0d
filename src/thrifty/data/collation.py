"""Collation of user examples into batches of equal form, with seeded random generators."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from thrifty.core.batches import Batch
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.randomness import preserved_draws, seed_of, start_draws
from thrifty.data.batch_forms import take_apart
from thrifty.data.data_loading import Collate


@contextmanager
def seeded_draws(key: str) -> Iterator[None]:
    """Seed the CPU generators of Python, numpy and torch by a key; restore the states of the generators at the end."""
    with preserved_draws():
        start_draws(seed_of(key))
        yield


def _generator_states() -> tuple[Any, ...]:
    _, words, place, *_ = np.random.get_state()
    return random.getstate(), words.tobytes(), place, torch.random.get_rng_state().numpy().tobytes()


class Collation:
    """A collate function whose batches all have the form of the first batch.

    A batch may have any form (see `take_apart`). The tensors of a user's batch become the fields of a `Batch`. `put`
    assembles a batch in the user's form. Raises UsageError for a part that does not have one row per example.
    """

    def __init__(self, collate: Collate | None, examples: Sequence[Any]):
        self.collate = collate or default_collate
        self.form, self.put = "", None
        with seeded_draws("first"):
            before = _generator_states()
            self._collated(examples)
            self.draws = _generator_states() != before
        """True if the collate function uses random values. Its random values depend on the whole batch."""

    def fields(self, examples: Sequence[Any], key: str) -> dict[str, Tensor]:
        """Return the tensors of a batch of examples, with random values seeded by `key`."""
        with seeded_draws(key):
            return self._collated(examples)

    def assembled(self, batch: Batch) -> Any:
        """Return a batch in the form that the collate function returns."""
        assert self.put is not None
        return self.put(batch.fields)

    def _collated(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        try:
            batch = self.collate(list(examples))
        except Exception as error:
            if isinstance(error, ThriftyError):
                raise
            raise UsageError(
                f"{len(examples)} examples cannot be collated: {type(error).__name__}: {error}",
                fix="return examples with parts of the same shape; or pass collate=, a function for these examples",
            ) from error
        fields, form, put = take_apart(batch)
        if not self.form:
            self.form, self.put = form, put
        if form != self.form:
            raise UsageError(
                f"examples of the dataset differ in form: first {self.form}, then {form}",
                fix="return the same keys for every example; or pass collate=, a function that returns the same keys",
            )
        if not fields:
            raise UsageError(f"a batch has no tensors: {form}", fix="return tensors from the dataset")
        for name, tensor in fields.items():
            if tensor.ndim == 0 or len(tensor) != len(examples):
                raise UsageError(
                    f"part {name!r} of a batch of {len(examples)} examples has the shape {tuple(tensor.shape)}, not "
                    "one row for each example",
                    fix="pass collate=, a function that returns tensors with one row per example",
                )
        return fields
