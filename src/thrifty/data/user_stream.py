"""Iterable datasets of users, read in their order."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource, may_be_any_examples
from thrifty.core.errors import RefusedError, ThriftyError, UsageError
from thrifty.data.batch_forms import deep_copy, hashed, same_values
from thrifty.data.collation import Collation, seeded_draws
from thrifty.data.data_loading import Collate, DataParts

COMPARED = 4
"""Number of examples that are read twice to check that a dataset can restart and can restore its state."""


class UserStream(BatchSource):
    """Examples of an iterable dataset in its order. At the end, the dataset starts again.

    Checkpoints contain the state of the dataset if its `state_dict` and `load_state_dict` work. Otherwise a resumed run
    reads all earlier examples again. Every rank reads whole effective batches. Raises RefusedError for a dataset that
    cannot restart.
    """

    def __init__(self, parts: DataParts, batch: int, seed: int, collate: Collate | None):
        self.dataset, self.batch, self.seed = parts.dataset, batch, seed
        self._copy = deep_copy(parts.dataset)
        """Copy of the dataset before the first read; None if the dataset cannot be copied."""
        kind = type(parts.dataset).__name__
        if iter(parts.dataset) is parts.dataset:
            raise RefusedError(
                f"a {kind} can be read once only, but a resumed run must read it from the start",
                fix="return a new iterator from __iter__",
            )
        self._start(0)
        first = list(islice(self._examples, COMPARED))
        self.collation = Collation(collate, first[:2])
        self._start(0)
        self._first, again = self._fields(first), self._fields(list(islice(self._examples, COMPARED)))
        if part := same_values(self._first, again):
            self.unrepeatable = f"the first examples of data ({kind}) differ in {part!r} when they are read twice"
        self.keeps_state = self._restores()
        resuming = (
            "checkpoints keep the state of the dataset"
            if self.keeps_state
            else "the dataset cannot restore its state, so a resumed run reads all earlier examples again"
        )
        self.notices = (*parts.notices, f"the dataset is iterable: {resuming}")
        self._start(0)
        self._step, self._read = -1, {}

    @property
    def in_thread(self) -> bool:
        return False

    def fingerprint(self) -> str:
        """Return a hash of the form and the first examples. If examples change between reads, hash only the form."""
        digest = hashlib.sha256(f"{type(self.dataset).__qualname__}/{self.collation.form}".encode())
        for tensor in () if self.unrepeatable else self._first.values():
            digest.update(hashed(tensor))
        return digest.hexdigest()

    def rows(self, step: int, start: int, stop: int) -> Batch:
        if may_be_any_examples():
            step = self._step if self._read else 0
        if step != self._step:
            self._move_to(step * self.batch)
            examples = [next(self._examples) for _ in range(self.batch)]
            self._step, self._read = step, self.collation.fields(examples, f"{self.seed}/{step}/collate")
        return Batch(self._read, torch.full((self.batch,), 1 / self.batch)).rows(start, stop)

    def state(self) -> dict[str, Any]:
        """Return the position of the next example as JSON values; {} if a resumed run reads all earlier examples."""
        return self._position() if self.keeps_state and self._at else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if state:
            self._start(state["cycle"])
            self._open.load_state_dict(state["dataset"])
            self._at, self._step = state["examples"], -1

    def _position(self) -> dict[str, Any]:
        return {"examples": self._at, "cycle": self._cycle, "dataset": self._open.state_dict()}

    def _restores(self) -> bool:
        """Return True if the dataset continues with the next example after loading its state."""
        if not hasattr(self.dataset, "state_dict") or not hasattr(self.dataset, "load_state_dict"):
            return False
        if self._copy is None or self.unrepeatable or _has_shuffle_buffer(self.dataset):
            return False
        return all(self._restores_at(examples) for examples in (1, 2 * self.batch + 1))

    def _restores_at(self, examples: int) -> bool:
        self._start(0)
        self._move_to(examples)
        try:
            state = json.loads(json.dumps(self._position()))
            wanted = self._fields(list(islice(self._examples, COMPARED)))
            self.load_state(state)
            return not same_values(wanted, self._fields(list(islice(self._examples, COMPARED))))
        except Exception:  # the user's class may raise anything
            return False

    def _fields(self, examples: Sequence[Any]) -> dict[str, Tensor]:
        joined: dict[str, Tensor] = {}
        for number, example in enumerate(examples):
            fields = self.collation.fields([example], "compared")
            joined |= {f"{name} of example {number}": tensor for name, tensor in fields.items()}
        return joined

    def _move_to(self, number: int) -> None:
        if number < self._at:
            self._start(0)
        while self._at < number:
            next(self._examples)

    def _start(self, cycle: int) -> None:
        self._reopen(cycle)
        self._at = 0
        self._examples = self._iterated()

    def _reopen(self, cycle: int) -> None:
        self._open, self._cycle = self.dataset if self._copy is None else deep_copy(self._copy), cycle
        if hasattr(self._open, "set_epoch"):
            self._open.set_epoch(cycle)

    def _iterated(self) -> Iterator[Any]:
        """Yield examples without end. The number of an example seeds its random values."""
        empty = 0
        while empty < 2:  # a dataset that resumes at its end yields nothing at first
            iterator, empty = None, empty + 1
            while True:
                try:
                    with seeded_draws(f"{self.seed}/{self._at}"):
                        iterator = iter(self._open) if iterator is None else iterator
                        example = next(iterator)
                except StopIteration:
                    break
                except Exception as error:
                    if isinstance(error, ThriftyError):
                        raise
                    raise UsageError(
                        f"example {self._at} of the dataset ({type(self.dataset).__name__}) cannot be read: "
                        f"{type(error).__name__}: {error}",
                        fix="correct the dataset's __iter__",
                    ) from error
                self._at, empty = self._at + 1, 0
                yield example
            self._reopen(self._cycle + 1)
        raise UsageError("the dataset has no examples", fix="pass a dataset with examples")


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Return True for a shuffled `datasets.IterableDataset`. Its state lacks the examples in the shuffle buffer."""
    inner = getattr(dataset, "_ex_iterable", None)
    while inner is not None and not hasattr(inner, "buffer_size"):
        inner = getattr(inner, "ex_iterable", None)
    return inner is not None


def first_examples(dataset: Any, count: int) -> list[Any]:
    """Return the first `count` examples of an iterable dataset."""
    examples = []
    iterator = None
    for number in range(count):
        with seeded_draws(f"held out/{number}"):
            iterator = iter(dataset) if iterator is None else iterator
            try:
                examples.append(next(iterator))
            except StopIteration:
                break
    return examples
