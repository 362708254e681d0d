"""Prefetching of batches in a background thread or in worker processes."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import torch
from torch.utils.data import DataLoader, Dataset

from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import ThriftyError


def prefetch(source: BatchSource, start: int, stop: int | None, depth: int = 2) -> Iterator[Batch]:
    """Yield `source.at(step)` for steps start … stop-1, without end if `stop` is None.

    A thread computes up to `depth` batches ahead. An error is raised at the step whose batch failed. The thread ends
    when the iterator is exhausted, closed or garbage-collected. A source that is not thread-safe is read in the calling
    thread, or by worker processes of a torch DataLoader.
    """
    if source.loading:
        yield from _loaded(source, count(start) if stop is None else range(start, stop))
        return
    if not source.in_thread:
        yield from map(source.at, count(start) if stop is None else range(start, stop))
        return
    steps = iter(count(start) if stop is None else range(start, stop))
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
    try:
        pending = deque(pool.submit(source.at, step) for step in islice(steps, depth))
        while pending:
            batch = pending.popleft().result()
            pending.extend(pool.submit(source.at, step) for step in islice(steps, 1))
            yield batch
    finally:
        # Do not wait: garbage collection may run this in the pool's thread, which cannot wait for itself. At
        # interpreter shutdown the pool no longer exists.
        if not sys.is_finalizing():
            pool.shutdown(wait=False, cancel_futures=True)


class _Steps(Dataset[Batch | ThriftyError]):
    """Dataset of batches by step. ThriftyErrors are returned, because torch keeps only the text of raised errors."""

    def __init__(self, source: BatchSource):
        self.source = source

    def __getitem__(self, step: int) -> Batch | ThriftyError:
        try:
            return self.source.at(step)
        except ThriftyError as error:
            return error


def _loaded(source: BatchSource, steps: Iterable[int]) -> Iterator[Batch]:
    options = dict(source.loading)
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"  # the source may not be picklable
    loader = DataLoader(
        _Steps(source), batch_size=None, sampler=steps, collate_fn=_unchanged, generator=torch.Generator(), **options
    )
    for batch in loader:
        if isinstance(batch, ThriftyError):
            raise batch
        yield batch


def _unchanged(batch: Batch) -> Batch:
    return batch
