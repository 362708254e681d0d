import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thrifty.kernels.example_rng import example_keys, random_fractions, random_integers, random_subset


@given(seed=st.integers(0, 2**40), start=st.integers(0, 2**50), count=st.integers(1, 50))
def test_key_depends_only_on_seed_and_index(seed, start, count):
    keys = example_keys(seed, np.arange(start, start + count))
    assert len(set(keys.tolist())) == count
    assert example_keys(seed, np.array([start + count - 1]))[0] == keys[-1]
    assert not set(keys.tolist()) & set(example_keys(seed + 1, np.arange(start, start + count)).tolist())


@given(skip=st.integers(0, 500), count=st.integers(1, 50))
def test_random_numbers_can_start_at_any_position(skip, count):
    keys = example_keys(3, np.arange(4))
    assert np.array_equal(random_integers(keys, skip + count)[:, skip:], random_integers(keys, count, skip))


def test_random_numbers_equal_splitmix64():
    # the first outputs of the reference generator for seed 1234567, as published with its test vectors
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_integers(np.array([1234567]), 4)[0].tolist() == expected


def test_random_numbers_are_uniform_within_and_across_examples():
    numbers = random_fractions(random_integers(example_keys(0, np.arange(1000)), 100))
    assert numbers.min() >= 0 and numbers.max() < 1
    for axis in (0, 1):
        means = numbers.mean(axis=axis)
        spread = np.sqrt(1 / 12 / numbers.shape[axis])
        assert abs(means - 0.5).max() < 5 * spread
        assert abs(means.std() / spread - 1) < 0.3
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02


def test_random_subset_is_sorted_by_position():
    scores = np.array([[5, 1, 4, 2], [9, 8, 7, 6]], dtype=np.uint64)
    assert random_subset(scores, 2).tolist() == [[1, 3], [2, 3]]
    assert random_subset(scores, 4).tolist() == [[0, 1, 2, 3]] * 2
