"""Sparse times sparse against torch's dense products and scipy's sparse ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.sparse import compiled_products
from thrifty.kernels.sparse.spgemm import spgemm_outer, spgemm_reference, spgemm_rows
from thrifty.machine.cpu_features import cpp_compiler

WAYS = (spgemm_rows, spgemm_outer, spgemm_reference)


def drawn(rows: int, columns: int, density: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, columns, generator=generator) < density
    return (torch.randn(rows, columns, generator=generator) * kept).to_sparse_csr()


@settings(max_examples=40)
@given(
    rows=st.integers(0, 30),
    inner=st.integers(0, 30),
    columns=st.integers(0, 30),
    density=st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
def test_every_way_gives_the_dense_product_and_the_places_of_scipy(
    rows: int, inner: int, columns: int, density: float, seed: int
) -> None:
    a, b = drawn(rows, inner, density, seed), drawn(inner, columns, density, seed + 1)
    dense = a.to_dense().double() @ b.to_dense().double()
    theirs = scipy.sparse.csr_array(a.to_dense().numpy()) @ scipy.sparse.csr_array(b.to_dense().numpy())
    theirs.sort_indices()
    for way in WAYS:
        found = way(a, b)
        torch.testing.assert_close(found.to_dense().double(), dense, rtol=1e-5, atol=1e-5)
        assert found.dtype is torch.float32 and found.shape == dense.shape
        assert found.crow_indices().tolist() == theirs.indptr.tolist()
        assert found.col_indices().tolist() == theirs.indices.tolist()


@pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("density", [0.005, 0.2])
def test_both_orders_and_any_number_of_threads_give_the_same_bits(density: float) -> None:
    a, b = drawn(150, 400, density, 1), drawn(400, 600, density, 2)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found += [spgemm_rows(a, b), spgemm_outer(a, b)]
        finally:
            torch.set_num_threads(1)
    for other in found[1:]:
        assert torch.equal(found[0].values(), other.values())
        assert torch.equal(found[0].col_indices(), other.col_indices())


def test_without_a_compiler_it_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_products.PRODUCTS, "is_there", lambda: False)
    a, b = drawn(9, 8, 0.4, 3), drawn(8, 7, 0.4, 4)
    for way in WAYS:
        torch.testing.assert_close(way(a, b).to_dense(), a.to_dense() @ b.to_dense())


def test_what_is_no_product_of_sparse_matrices_is_refused() -> None:
    a = drawn(4, 5, 0.5, 0)
    with pytest.raises(UsageError, match="5 columns, 4 rows"):
        spgemm_rows(a, a)
    with pytest.raises(UsageError, match=r"to_sparse_csr\(\)"):
        spgemm_outer(a, torch.ones(5, 2))


LITTLE_MEMORY = """
import resource, torch
from thrifty.core.errors import ThriftyError
from thrifty.kernels.sparse import compiled_products
from thrifty.kernels.sparse.spgemm import spgemm_outer, spgemm_rows

wide = 2**28
one = torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 1))
row = torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([5]), torch.ones(1), (1, wide))
assert spgemm_rows(one, one).values().tolist() == [1.0]  # compiled now
if compiled_products.PRODUCTS.is_there():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
    for product in spgemm_rows, spgemm_outer:
        try:
            product(one, row)
        except ThriftyError as told:
            print(told.what)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_memory_that_is_not_there_is_told_and_ends_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = f"SpGEMM has no memory for a row of {2**28:,} columns in each thread, 17 bytes a column\n"
    assert done.stdout in ("", 2 * said)
