"""Draws in torch against those in numpy that they stand for."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.kernels import example_rng
from thrifty.kernels.example_rng_torch import chosen, drawn

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)


@given(KEYS, st.integers(1, 40))
def test_numbers_are_those_of_the_data_bit_for_bit(keys, count):
    found = drawn(torch.tensor(keys), count).numpy().view(np.uint64)
    assert np.array_equal(found, example_rng.drawn(np.array(keys, dtype=np.int64), count))


@given(KEYS, st.data())
def test_places_are_those_of_the_smallest_unsigned_numbers(keys, data):
    total = data.draw(st.integers(1, 40))
    count = data.draw(st.integers(1, total))
    scores = example_rng.drawn(np.array(keys, dtype=np.int64), total)
    assert np.array_equal(chosen(drawn(torch.tensor(keys), total), count).numpy(), example_rng.chosen(scores, count))
