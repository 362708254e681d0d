"""The batches of coming steps, computed in the background while the present one is trained on."""

import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

from thrifty.core.batches import Batch, BatchSource


def prefetch(source: BatchSource, start: int, stop: int | None, depth: int = 2) -> Iterator[Batch]:
    """`source.at(step)` for steps start … stop-1 (for ever if None), up to `depth` of them computed ahead in a thread.

    An error surfaces at the step it belongs to. The thread ends with the iterator: when it is exhausted, closed or
    collected. A source that is not for threads is asked at each step.
    """
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
        # Not waiting: the collector may run this in the pool's own thread, which cannot wait for itself. At the very
        # end of the interpreter the pool is gone already.
        if not sys.is_finalizing():
            pool.shutdown(wait=False, cancel_futures=True)
