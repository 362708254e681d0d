"""SpMM and SDDMM in CSR and in blocks compared with dense products: gradients, dtypes, threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import sddmm_reference, spmm_reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.core.errors import UsageError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.kernels.sparse import block_sparse_matrix, compiled_products
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix
from thrifty.kernels.sparse.csr_matrix import CsrMatrix
from thrifty.kernels.sparse.sparse_linear import sparse_linear
from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern
from thrifty.machine.cpu_features import cpp_compiler

needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler")


def random_mask(rows: int, columns: int, density: float, block: int, seed: int) -> Tensor:
    """Return a random mask of whole blocks, with some empty block rows."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.rand(rows, columns, generator=generator) < density
    grid[torch.rand(rows, generator=generator) < 0.2] = False
    return grid.repeat_interleave(block, 0).repeat_interleave(block, 1)


def patterns(mask: Tensor) -> Iterator[SparsityPattern]:
    yield CsrMatrix.of(mask)
    if not any(width % 16 for width in mask.shape):
        yield BlockSparseMatrix.of(mask)


@pytest.fixture(params=["compiled", "torch", "dense product"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and cpp_compiler() is None:
        pytest.skip("there is no C++ compiler")
    if request.param != "compiled":
        monkeypatch.setattr(compiled_products, "native", lambda *tensors: False)
    if request.param == "dense product":
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    return request.param


def assert_equal_products(mask: Tensor, tokens: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, upstream = (torch.randn(tokens, width, generator=generator, dtype=dtype) for width in mask.shape[::-1])
    weight = torch.randn(mask.shape, generator=generator, dtype=dtype) * mask
    bias = torch.randn(len(mask), generator=generator, dtype=dtype)
    for pattern in patterns(mask):
        values = pattern.pick(weight)
        assert torch.equal(pattern.place(values), weight)
        near = {"rtol": tolerance, "atol": tolerance * max(tokens, mask.shape[1]) ** 0.5}
        for actual, dense, reference in (
            (pattern.spmm(x, values), x @ weight.T, spmm_reference(x, values, pattern)),
            (pattern.spmm(x, values, bias), F.linear(x, weight, bias), spmm_reference(x, values, pattern, bias)),
            (pattern.spmm_turned(upstream, pattern.turn(values)), upstream @ weight, None),
            (pattern.sddmm(upstream, x), pattern.pick(upstream.T @ x), sddmm_reference(upstream, x, pattern)),
        ):
            torch.testing.assert_close(actual, dense, **near)
            if reference is not None:
                torch.testing.assert_close(actual, reference, **near)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    tokens=st.integers(0, 150),
    density=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_csr_products_equal_dense_products(rows: int, columns: int, tokens: int, density: float, seed: int) -> None:
    assert_equal_products(random_mask(rows, columns, density, 1, seed), tokens, torch.float32, 1e-5)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    tokens=st.integers(0, 150),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_block_products_equal_dense_products(rows: int, columns: int, tokens: int, density: float, seed: int) -> None:
    assert_equal_products(random_mask(rows, columns, density, 16, seed), tokens, torch.float32, 1e-5)


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_every_variant_has_equal_products(variant: str, density: float) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        assert_equal_products(random_mask(3, 2, density, 16, 0), 37, dtype, tolerance)


@pytest.mark.parametrize("inputs", [16, 1040, 2064, 4112, 8208])
def test_every_tile_width_has_equal_products(inputs: int) -> None:
    """Wider inputs are processed in narrower tiles of tokens."""
    assert_equal_products(random_mask(2, inputs // 16, 0.2, 16, 1), 131, torch.float32, 1e-5)


def outputs_and_gradients(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor
) -> list:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    result = function(*leaves)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(7)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream)]


@pytest.mark.parametrize("form", [CsrMatrix, BlockSparseMatrix])
@pytest.mark.parametrize("dense_gradient", [False, True])
def test_sparse_linear_equals_dense_layer(form: type, dense_gradient: bool) -> None:
    mask = random_mask(3, 4, 0.4, 16, 5)
    pattern, x = form.of(mask), torch.randn(2, 9, 64)
    weight, bias = torch.randn(48, 64) * mask, torch.randn(48)
    actual = outputs_and_gradients(lambda *inputs: sparse_linear(*inputs, pattern, dense_gradient), x, weight, bias)
    expected = outputs_and_gradients(F.linear, x, weight, bias)
    if not dense_gradient:
        expected[2] = expected[2] * mask
    for mine, dense in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-5, atol=1e-4)


def test_16_bit_layer_rounds_once_and_returns_the_dense_dtype() -> None:
    mask = random_mask(3, 4, 0.4, 16, 6)
    weight, bias, x = torch.randn(48, 64) * mask, torch.randn(48), torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = sparse_linear(x, weight, bias, CsrMatrix.of(mask)), F.linear(x, weight, bias)
    assert actual.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(actual, F.linear(x, weight, bias).bfloat16(), rtol=1e-2, atol=1e-6)
    every = [tensor.bfloat16() for tensor in (x, weight, bias)]
    assert [t.dtype for t in outputs_and_gradients(lambda *g: sparse_linear(*g, CsrMatrix.of(mask)), *every)] == [
        torch.bfloat16
    ] * 4


@pytest.mark.parametrize("form", [CsrMatrix, BlockSparseMatrix])
def test_bias_of_another_dtype_is_not_read_as_float32(form: type) -> None:
    mask = random_mask(2, 3, 0.5, 16, 4)
    pattern, x, bias = form.of(mask), torch.randn(5, 48), torch.randn(32, dtype=torch.float64)
    values = pattern.pick(torch.randn(32, 48))
    expected = pattern.spmm(x, values).double() + bias
    torch.testing.assert_close(pattern.spmm(x, values, bias).double(), expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("form", [CsrMatrix, BlockSparseMatrix])
def test_result_is_independent_of_thread_count(form: type) -> None:
    mask = random_mask(12, 10, 0.3, 16, 8)
    pattern, x, upstream = form.of(mask), torch.randn(700, 160), torch.randn(700, 192)
    values = pattern.pick(torch.randn(192, 160))
    actual = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            actual.append((pattern.spmm(x, values), pattern.sddmm(upstream, x)))
        finally:
            torch.set_num_threads(1)
    for one, two in zip(*actual, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("form", [CsrMatrix, BlockSparseMatrix])
def test_shapes_and_flops_are_known_without_values(form: type) -> None:
    mask = random_mask(3, 4, 0.4, 16, 9)
    pattern = form.of(mask)
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [torch.empty(shape, requires_grad=True) for shape in ((9, 64), (48, 64), (48,))]
        with StepTrace() as trace:
            y = sparse_linear(*leaves, pattern)
            y.sum().backward()
        assert y.shape == (9, 48) and [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    assert trace.flops == 3 * 2 * 9 * int(mask.sum())


def test_operations_pass_torch_opcheck() -> None:
    mask = random_mask(2, 3, 0.5, 16, 10)
    one, many = CsrMatrix.of(mask), BlockSparseMatrix.of(mask).grid
    x, upstream = torch.randn(5, 48), torch.randn(5, 32)
    values = torch.randn(len(one.columns)), torch.randn(len(many.columns), 16, 16)
    for operation, arguments in (
        (torch.ops.thrifty.csr_spmm, (x, values[0], one.starts, one.columns, None, 32)),
        (torch.ops.thrifty.csr_sddmm, (upstream, x, one.starts, one.columns)),
        (torch.ops.thrifty.block_spmm, (x, values[1], many.starts, many.columns, None, 2)),
        (torch.ops.thrifty.block_sddmm, (upstream, x, many.starts, many.columns, 16)),
    ):
        torch.library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_multiplies_many_blocks_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_products, "native", lambda *tensors: False)
    monkeypatch.setattr(block_sparse_matrix, "BATCH_BYTES", 5000)
    assert_equal_products(random_mask(3, 5, 0.7, 16, 11), 20, torch.float32, 1e-5)


def test_larger_blocks_equal_dense_product() -> None:
    mask = random_mask(2, 3, 0.6, 32, 12)
    x, weight = torch.randn(21, 96), torch.randn(64, 96) * mask
    for block in (16, 32):
        pattern = BlockSparseMatrix.of(mask, block)
        assert pattern.density == pytest.approx(float(mask.float().mean()))
        torch.testing.assert_close(pattern.spmm(x, pattern.pick(weight)), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_matrix_that_blocks_do_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="48 x 40"):
        BlockSparseMatrix.of(torch.ones(48, 40, dtype=torch.bool))
