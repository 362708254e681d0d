"""A transform run on a processor piece by piece, so that what one element leaves is still in the cache for the next.

Run over all parameters, every element of a chain is a pass over main memory, and its temporary results are as large as
the model. Elements that look no further than rows or whole tensors can be run on pieces of half a megabyte instead,
each by one thread: the same arithmetic, two to three times faster, with temporaries of a few pieces. On other devices,
where launching counts for more, there is one piece.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thrifty.core.transforms import Numbers, Reach, Slots, Transform

NUMBERS = 128 * 1024
"""Numbers in a piece, about; the memory of one core holds it together with its gradient and state."""

Span = tuple[int, slice | None]
"""A parameter's index and the rows of it that belong to a piece, None for all."""


@dataclass(frozen=True)
class Piece:
    spans: tuple[Span, ...]
    transform: Transform
    """What is run on this piece's parameters."""

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] if rows is None or not len(tensors[i]) else tensors[i][rows] for i, rows in self.spans]


class InPieces:
    """The tail of a chain in pieces that are as small as the reach of its elements allows."""

    def __init__(self, transform: Transform, parameters: Sequence[Tensor]):
        self.local = transform.reach is Reach.ROWS
        here = _local(parameters) if self.local else list(parameters)
        on_cpu = all(tensor.device.type == "cpu" for tensor in here)
        groups = _spans(here, self.local, NUMBERS if on_cpu else 0)
        self.pieces = [Piece(tuple(spans), transform.only([i for i, _ in spans])) for spans in groups]
        # collectives of sharded tensors must be met in one order by all ranks
        sharded = not self.local and any(isinstance(tensor, DTensor) for tensor in here)
        self.threads = torch.get_num_threads() if on_cpu and not sharded else 1

    def apply(
        self, gradients: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers, age: int
    ) -> None:
        if self.local:
            gradients, parameters = _local(gradients), _local(parameters)
            slots = {slot: _local(tensors) for slot, tensors in slots.items()}
        parts = [self.pieces[first :: self.threads] for first in range(min(self.threads, len(self.pieces)))]

        @torch.no_grad()
        def run(pieces: Sequence[Piece]) -> None:
            for piece in pieces:
                here = piece.of(parameters)
                state = {slot: piece.of(tensors) for slot, tensors in slots.items()}
                torch._foreach_add_(here, piece.transform.update(piece.of(gradients), state, here, numbers))

        if len(parts) > 1:
            list(_pool(self.threads).map(run, parts))
        else:
            run(self.pieces)


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What this rank holds of each tensor, sharing its memory."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _spans(tensors: Sequence[Tensor], by_rows: bool, numbers: int) -> Iterator[list[Span]]:
    """Groups of about `numbers` numbers: small tensors together, large ones by rows where that is allowed; all in one
    group when `numbers` is 0."""
    group: list[Span] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        count = tensor.numel()
        if not count:
            continue
        rows = max(1, numbers * len(tensor) // count) if by_rows and numbers and tensor.ndim else 0
        cuts = range(0, len(tensor), rows) if rows and rows < len(tensor) else [0]
        for start in cuts:
            group.append((index, slice(start, start + rows) if len(cuts) > 1 else None))
            filled += count // len(cuts)
            if numbers and filled >= numbers:
                yield group
                group, filled = [], 0
    if group:
        yield group


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that each compute alone: torch's own parallelism is switched off inside them."""
    here = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "thrifty-update", initializer=torch.set_num_threads, initargs=(1,))
    list(pool.map(lambda _: None, range(threads)))
    # setting it in a thread also sets what threads yet to come start with
    torch.set_num_threads(here)
    return pool
