"""Tokenized texts with labels, padded to equal length."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import ExampleIndex
from thrifty.data.epoch_sampler import fingerprint

NO_LABEL = -100
"""Label of tokens without a label, as in transformers."""


class PaddedTexts:
    """Texts padded to the length t of the longest text, see `objectives.labelled_text`.

    b texts have {"inputs": (b, t), "keep": bool (b, t), "labels": (b, …)}; pairs also have {"types": (b, t)}.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], length: int, padding: int, names: tuple[str, ...], form: str):
        self.tokens, self.types, self.ends, self.labels = (
            arrays[name] for name in ("tokens", "types", "ends", "labels")
        )
        self.length, self.padding, self.names, self.form = length, padding, names, form
        self.begins = np.concatenate(([0], self.ends))[:-1]
        self.has_words, self.has_types = form == "tags", bool(self.types.any())

    def __len__(self) -> int:
        return len(self.ends)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        offsets = np.arange(self.length)
        keep = offsets < (self.ends - self.begins)[indices, None]
        places = np.where(keep, self.begins[indices, None] + offsets, 0)
        rows = {"inputs": np.where(keep, self.tokens[places].astype(np.int64), self.padding), "keep": keep}
        if self.has_types:
            rows["types"] = np.where(keep, self.types[places], 0).astype(np.int64)
        rows["labels"] = np.where(keep, self.labels[places], NO_LABEL) if self.has_words else self.labels[indices]
        return {name: torch.from_numpy(values) for name, values in rows.items()}

    @property
    def classes(self) -> np.ndarray:
        """Labels of all texts; for word labels, of all words."""
        return self.labels[self.labels != NO_LABEL] if self.has_words else self.labels

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
        return [decode(self.tokens[self.begins[i] : self.ends[i]].tolist()) for i in indices]

    def label_of(self, index: int) -> str:
        """Return the label of a text for display."""
        if self.has_words:
            tags = self.labels[self.begins[index] : self.ends[index]]
            return " ".join(self.names[tag] for tag in tags if tag != NO_LABEL)
        label = self.labels[index]
        if np.ndim(label):
            return ", ".join(name for name, has in zip(self.names, label, strict=True) if has)
        return f"{label:g}" if label.dtype.kind == "f" else self.names[label]

    def example_index(self) -> ExampleIndex:
        if self.form != "class":
            return ExampleIndex(len(self), self._fingerprint)
        return ExampleIndex(len(self), self._fingerprint, torch.from_numpy(self.labels), self.names)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokens, self.ends, self.labels, also=(self.length, self.names))
