"""SpGEMM compared with torch's dense products and scipy's sparse ones."""

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

FUNCTIONS = (spgemm_rows, spgemm_outer, spgemm_reference)


def random_csr(rows: int, columns: int, density: float, seed: int) -> Tensor:
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
def test_products_equal_dense_values_and_scipy_indices(
    rows: int, inner: int, columns: int, density: float, seed: int
) -> None:
    a, b = random_csr(rows, inner, density, seed), random_csr(inner, columns, density, seed + 1)
    dense = a.to_dense().double() @ b.to_dense().double()
    theirs = scipy.sparse.csr_array(a.to_dense().numpy()) @ scipy.sparse.csr_array(b.to_dense().numpy())
    theirs.sort_indices()
    for function in FUNCTIONS:
        actual = function(a, b)
        torch.testing.assert_close(actual.to_dense().double(), dense, rtol=1e-5, atol=1e-5)
        assert actual.dtype is torch.float32 and actual.shape == dense.shape
        assert actual.crow_indices().tolist() == theirs.indptr.tolist()
        assert actual.col_indices().tolist() == theirs.indices.tolist()


@pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("density", [0.005, 0.2])
def test_order_and_thread_count_do_not_change_the_result(density: float) -> None:
    a, b = random_csr(150, 400, density, 1), random_csr(400, 600, density, 2)
    actual = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            actual += [spgemm_rows(a, b), spgemm_outer(a, b)]
        finally:
            torch.set_num_threads(1)
    for other in actual[1:]:
        assert torch.equal(actual[0].values(), other.values())
        assert torch.equal(actual[0].col_indices(), other.col_indices())


def test_reference_is_used_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_products.PRODUCTS, "is_there", lambda: False)
    a, b = random_csr(9, 8, 0.4, 3), random_csr(8, 7, 0.4, 4)
    for function in FUNCTIONS:
        torch.testing.assert_close(function(a, b).to_dense(), a.to_dense() @ b.to_dense())


def test_invalid_sparse_products_are_refused() -> None:
    a = random_csr(4, 5, 0.5, 0)
    with pytest.raises(UsageError, match="A has 5 columns, but B has 4 rows"):
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
assert spgemm_rows(one, one).values().tolist() == [1.0]  # compiles the library
if compiled_products.PRODUCTS.is_there():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
    for product in spgemm_rows, spgemm_outer:
        try:
            product(one, row)
        except ThriftyError as error:
            print(error.what)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_missing_memory_is_an_error_and_ends_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message = f"SpGEMM needs 17 bytes per column in each thread, but there is no memory for {2**28:,} columns\n"
    assert done.stdout in ("", 2 * message)
