import gc
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch

from thrifty.core.batches import BatchSource
from thrifty.data.prefetch import prefetch
from thrifty.data.text.token_windows import PackedTokens


def source():
    return PackedTokens(np.arange(1001, dtype=np.uint16), 10, 8, seed=0)


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def no_threads_within(seconds):
    end = time.monotonic() + seconds
    while threads() and time.monotonic() < end:
        time.sleep(0.01)
    return not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_equal_the_source_in_order(depth):
    ahead = list(prefetch(source(), 3, 20, depth))
    assert len(ahead) == 17
    for step, batch in enumerate(ahead, start=3):
        assert torch.equal(batch["tokens"], source().at(step)["tokens"])


def test_without_a_stop_it_continues():
    steps = prefetch(source(), 0, None)
    assert len(list(islice(steps, 50))) == 50
    steps.close()
    assert no_threads_within(5)


def test_nothing_to_do_ends_at_once():
    assert list(prefetch(source(), 5, 5)) == []


class Fails(BatchSource):
    batch = 8

    def rows(self, step, start, stop):
        if step == 4:
            raise OSError("the disk went away")
        return source().rows(step, start, stop)


def test_error_is_raised_at_its_step():
    steps = prefetch(Fails(), 0, 10, depth=3)
    assert len(list(islice(steps, 4))) == 4
    with pytest.raises(OSError, match="the disk went away"):
        next(steps)
    assert no_threads_within(5)


def test_the_thread_ends_when_the_iterator_is_exhausted():
    list(prefetch(source(), 0, 4))
    assert no_threads_within(5)


def test_the_thread_ends_when_the_iterator_is_collected():
    steps = prefetch(source(), 0, None)
    next(steps)
    assert threads()
    del steps
    gc.collect()
    assert no_threads_within(5)


class Counts(BatchSource):
    batch = 8

    def __init__(self):
        self.requested = []

    def rows(self, step, start, stop):
        self.requested.append(step)
        return source().rows(step, start, stop)


def test_no_more_than_depth_steps_are_computed_ahead():
    counting = Counts()
    steps = prefetch(counting, 0, None, depth=2)
    next(steps)
    time.sleep(0.2)
    assert counting.requested == [0, 1, 2]
    steps.close()
