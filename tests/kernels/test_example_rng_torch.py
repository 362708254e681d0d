"""Random numbers in torch compared with those in NumPy."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.kernels import example_rng
from thrifty.kernels.example_rng_torch import random_integers_torch, random_subset_torch

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)


@given(KEYS, st.integers(1, 40))
def test_random_numbers_equal_numpy(keys, count):
    actual = random_integers_torch(torch.tensor(keys), count).numpy().view(np.uint64)
    assert np.array_equal(actual, example_rng.random_integers(np.array(keys, dtype=np.int64), count))


@given(KEYS, st.data())
def test_random_subset_equals_numpy(keys, data):
    total = data.draw(st.integers(1, 40))
    count = data.draw(st.integers(1, total))
    scores = example_rng.random_integers(np.array(keys, dtype=np.int64), total)
    assert np.array_equal(
        random_subset_torch(random_integers_torch(torch.tensor(keys), total), count).numpy(),
        example_rng.random_subset(scores, count),
    )
