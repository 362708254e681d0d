import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from thrifty.kernels.keyed_permutation import permute


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


@given(n=st.integers(1, 2**48), seed=st.integers(0, 100))
def test_large_domains_have_no_collisions(n, seed):
    positions = np.unique(np.linspace(0, n - 1, 200).astype(np.int64))
    values = permute(positions, n, seed)
    assert values.min() >= 0 and values.max() < n
    assert len(np.unique(values)) == len(positions)


@given(n=st.integers(2, 500), seed=st.integers(0, 100), data=st.data())
def test_a_position_is_independent_of_the_others(n, seed, data):
    some = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    assert (permute(some, n, seed) == permute(np.arange(n), n, seed)[some]).all()


def test_key_changes_the_order():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_every_position_is_equally_likely():
    n, trials = 12, 6000
    seen = np.zeros((n, n))
    for seed in range(trials):
        seen[np.arange(n), permute(np.arange(n), n, seed)] += 1
    expected = trials / n
    chi_squared = ((seen - expected) ** 2 / expected).sum()
    freedom = (n - 1) ** 2
    assert abs(chi_squared - freedom) < 6 * np.sqrt(2 * freedom)


def test_neighbors_are_separated():
    order = permute(np.arange(10_000), 10_000, 1)
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # about 2 are expected
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_order_is_the_same_across_versions():
    assert permute(np.arange(8), 8, 0, 0).tolist() == [2, 1, 7, 6, 0, 4, 3, 5]
