"""Packing of whole conversations into rows: one per row, or several."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.data.epoch_sampler import HELD_OUT_KEY, HeldOutExamples
from thrifty.kernels.keyed_permutation import permute

ANSWER = 1 << 31
BEGINS = 1 << 30
TOKEN = BEGINS - 1
"""Bit mask of the token id in a stored 32-bit token. The two highest bits are the flags ANSWER and BEGINS."""


def arrange_rows(sizes: np.ndarray, length: int, seed: int, together: bool) -> list[np.ndarray]:
    """Return the conversation numbers of each row: packed by size if `together`, otherwise one per row."""
    return pack_rows(sizes, length, seed) if together else list(np.arange(len(sizes))[:, None])


def pack_rows(sizes: np.ndarray, length: int, seed: int) -> list[np.ndarray]:
    """Return the conversation numbers of each row of `length` tokens, packed by best-fit decreasing.

    Best-fit decreasing (Johnson et al. 1974) requires at most 11/9 of the minimum number of rows, plus one row. `seed`
    determines the order of conversations of equal size.
    """
    shuffled = permute(np.arange(len(sizes)), len(sizes), seed)
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # rows by number of free tokens
    spaces: list[int] = []  # keys of `with_space`, ascending
    for number in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        size = int(sizes[number])
        fitting = bisect_left(spaces, size)
        if fitting == len(spaces):
            row, space = len(rows), length
            rows.append([])
        else:
            space = spaces[fitting]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[fitting]
        rows[row].append(int(number))
        left = space - size
        if left not in with_space:
            with_space[left] = []
            insort(spaces, left)
        with_space[left].append(row)
    return [np.array(row) for row in rows]


class StoredConversations:
    """Conversations in a stream of stored tokens. Each conversation is cut after `length` + 1 tokens.

    `learned` is the number of predicted tokens of each conversation: tokens of answers, or with `everything` all except
    the first token. Conversations without a predicted token are left out.
    """

    def __init__(self, words: np.ndarray, length: int, everything: bool):
        self.words, self.everything = words, everything
        begins = np.flatnonzero(words & BEGINS)
        whole = np.diff(begins, append=len(words))
        sizes = np.minimum(whole, length + 1)
        answers = np.concatenate(([0], np.cumsum((words & ANSWER) != 0)))
        learned = sizes - 1 if everything else answers[begins + sizes] - answers[begins + 1]
        kept = learned > 0
        self.begins, self.sizes, self.learned = begins[kept], sizes[kept], learned[kept]
        self.cut = float((whole > sizes).mean()) if len(whole) else 0.0
        """Fraction of conversations that are cut."""

    def __len__(self) -> int:
        return len(self.begins)

    def at(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the n tokens of one conversation (n,), and a mask of predicted tokens after the first (n - 1,)."""
        words = self.words[self.begins[number] : self.begins[number] + self.sizes[number]]
        predicted = np.ones(len(words) - 1, bool) if self.everything else (words[1:] & ANSWER) != 0
        return (words & TOKEN).astype(np.int64), predicted


@dataclass(frozen=True)
class PackedConversations:
    """Conversations packed into rows of `length` tokens. An example is a row; b rows of t = `length` tokens have:

    "tokens", "targets"   (b, t), inputs and next tokens
    "segments"            (b, t), number of each token's conversation in its row, from 1; 0 on padding
    "share"               (b, t), weight of each prediction in its row, with a sum of 1; 0 for tokens without a loss
    "amount"              (b,), relative weight of each row in a batch

    With `by_tokens`, all predicted tokens have the same weight. Otherwise all conversations have the same weight.
    """

    conversations: StoredConversations
    places: list[np.ndarray]
    length: int
    filler: int
    by_tokens: bool = True

    def __len__(self) -> int:
        return len(self.places)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        shape = len(indices), self.length
        tokens, targets = np.full(shape, self.filler), np.full(shape, self.filler)
        segments, share = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        amount = np.zeros(len(indices), np.float32)
        for row, index in enumerate(indices):
            chosen = self.places[index]
            learned = self.conversations.learned[chosen]
            each = np.full(len(chosen), 1 / learned.sum()) if self.by_tokens else 1 / (learned * len(chosen))
            amount[row] = learned.sum() if self.by_tokens else len(chosen)
            start = 0
            for segment, number in enumerate(chosen):
                words, predicted = self.conversations.at(number)
                columns = slice(start, start + len(predicted))
                tokens[row, columns], targets[row, columns] = words[:-1], words[1:]
                segments[row, columns], share[row, columns] = segment + 1, predicted * each[segment]
                start = columns.stop
        arrays = {"tokens": tokens, "targets": targets, "segments": segments, "share": share, "amount": amount}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}


class WeightedSource(WrappedSource):
    """Source whose examples have weights proportional to "amount", with sum 1 in each batch."""

    def __init__(self, source: BatchSource):
        self.source, self.batch = source, source.batch

    @property
    def unit(self) -> int:
        return self.source.unit

    def size(self, step: int) -> int:
        return self.source.size(step)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        whole = self.source.at(step)
        return whole.weighted(whole["amount"] / whole["amount"].sum()).rows(start, stop)

    def amount(self, step: int) -> float:
        return float(self.source.at(step)["amount"].sum())

    def with_batch_size(self, sizes: list[int]) -> BatchSource:
        return WeightedSource(self.source.with_batch_size(sizes))


class HeldOutConversations(HeldOutExamples):
    """Conversations for evaluation. The selected conversations do not depend on seed or packing."""

    def __init__(self, rows: PackedConversations, together: bool):
        super().__init__(rows)
        self.template, self.together = rows, together

    def __len__(self) -> int:
        return len(self.template.conversations)

    def batches(self, examples: int, batch: int) -> Iterator[Batch]:
        """Yield the first `examples` conversations in batches of at most `batch` rows, weighted as in
        `HeldOutExamples`."""
        like = self.template
        chosen = permute(np.arange(min(examples, len(self))), len(self), HELD_OUT_KEY)
        sizes = like.conversations.sizes[chosen] - 1
        rows = replace(like, places=[chosen[row] for row in arrange_rows(sizes, like.length, 0, self.together)])
        parts = [rows.fields(np.arange(start, min(start + batch, len(rows)))) for start in range(0, len(rows), batch)]
        total = sum(float(part["amount"].sum()) for part in parts)
        yield from (self.shape(Batch(part, part["amount"] / total)) for part in parts)
