"""Rows filled with whole conversations: as many to a row as fit, or one to each."""

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
"""A stored token is one word of 32 bits: its number, whether it belongs to an answer, whether a conversation begins."""


def arrange_rows(sizes: np.ndarray, length: int, seed: int, together: bool) -> list[np.ndarray]:
    """The conversations of each row, of which these are the sizes: `together` as many as fit, otherwise one."""
    return pack_rows(sizes, length, seed) if together else list(np.arange(len(sizes))[:, None])


def pack_rows(sizes: np.ndarray, length: int, seed: int) -> list[np.ndarray]:
    """Which conversations share a row of `length` places: the longest first, each into the row it fills best.

    Best-fit decreasing (Johnson et al. 1974), which needs at most 11/9 of the fewest rows possible, and one more.
    Conversations of the same size come in an order that `seed` decides.
    """
    shuffled = permute(np.arange(len(sizes)), len(sizes), seed)
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # rows by the places left in them
    spaces: list[int] = []  # the keys of that, ascending
    for place in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        size = int(sizes[place])
        at = bisect_left(spaces, size)
        if at == len(spaces):
            row, space = len(rows), length
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(int(place))
        left = space - size
        if left not in with_space:
            with_space[left] = []
            insort(spaces, left)
        with_space[left].append(row)
    return [np.array(row) for row in rows]


class StoredConversations:
    """A stream of stored tokens as conversations, each cut after `length` + 1 tokens.

    `learned` counts the tokens of each that are to be predicted: those of answers, or with `everything` all but the
    first. Conversations in which nothing is left to learn are left out.
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
        """The share that is longer than it may be."""

    def __len__(self) -> int:
        return len(self.begins)

    def at(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of one conversation (n,), and which are to be predicted (n - 1,), of those behind the first."""
        words = self.words[self.begins[number] : self.begins[number] + self.sizes[number]]
        wanted = np.ones(len(words) - 1, bool) if self.everything else (words[1:] & ANSWER) != 0
        return (words & TOKEN).astype(np.int64), wanted


@dataclass(frozen=True)
class PackedConversations:
    """Conversations in rows of `length` places, as examples with a row each.

    "tokens" and "targets" (b, t): what is read and what comes next. "segments" (b, t): the number of each token's
    conversation in its row from 1 on, 0 where nothing is. "share" (b, t): how much each prediction counts in its row,
    0 or as much as others, with a sum of 1. "amount" (b,): how much a row counts beside others.
    By tokens every token to be learned counts alike, in a short answer and in a long one; by conversations every
    conversation does.
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
                read, wanted = self.conversations.at(number)
                here = slice(start, start + len(wanted))
                tokens[row, here], targets[row, here] = read[:-1], read[1:]
                segments[row, here], share[row, here] = segment + 1, wanted * each[segment]
                start = here.stop
        made = {"tokens": tokens, "targets": targets, "segments": segments, "share": share, "amount": amount}
        return {name: torch.from_numpy(values) for name, values in made.items()}


class WeightedSource(WrappedSource):
    """Another source whose examples weigh as much as their "amount" says, beside the others of their batch."""

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
    """Conversations for evaluation: which they are depends neither on a seed nor on how they share rows."""

    def __init__(self, rows: PackedConversations, together: bool):
        super().__init__(rows)
        self.template, self.together = rows, together

    def __len__(self) -> int:
        return len(self.template.conversations)

    def batches(self, examples: int, batch: int) -> Iterator[Batch]:
        """The first `examples` conversations in batches of at most `batch` rows; weights as in `HeldOutExamples`."""
        like = self.template
        chosen = permute(np.arange(min(examples, len(self))), len(self), HELD_OUT_KEY)
        sizes = like.conversations.sizes[chosen] - 1
        rows = replace(like, places=[chosen[row] for row in arrange_rows(sizes, like.length, 0, self.together)])
        parts = [rows.fields(np.arange(start, min(start + batch, len(rows)))) for start in range(0, len(rows), batch)]
        total = sum(float(part["amount"].sum()) for part in parts)
        yield from (self.shape(Batch(part, part["amount"] / total)) for part in parts)
