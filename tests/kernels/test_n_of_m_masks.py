"""N:M masks compared with brute force, gradient estimates with their expectation, products with autograd."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as some
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import (
    _sparse_semi_structured_tile,
    sparse_semi_structured_to_dense_cutlass,
)

from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels import n_of_m_linear
from thrifty.kernels.n_of_m_linear import NOfMProducts, has_sparse_units, masked_linear
from thrifty.kernels.n_of_m_masks import (
    NOfMPattern,
    add_masked_decay,
    keep_probabilities,
    n_of_m_mask,
    unbiased_estimate,
)
from thrifty.kernels.transposable_masks import TILES_AT_ONCE, transposable_mask, transposable_patterns

PATTERNS = [(1, 2), (2, 4), (1, 4), (3, 4), (2, 3), (4, 8)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best_tile(tile: Tensor, n: int) -> float:
    """Return the largest kept sum of magnitudes over all tiles with n of m in each row and column."""
    m = len(tile)
    magnitude = tile.abs().double().tolist()
    actual = 0.0
    for rows in itertools.product(itertools.combinations(range(m), n), repeat=m):
        if all(sum(column in row for row in rows) == n for column in range(m)):
            actual = max(actual, sum(magnitude[i][j] for i, row in enumerate(rows) for j in row))
    return actual


@given(
    pattern=some.sampled_from(PATTERNS),
    rows=some.integers(1, 4),
    groups=some.integers(1, 5),
    seed=some.integers(0, 9999),
)
def test_mask_keeps_largest_of_each_group_and_first_of_equals(
    pattern: tuple[int, int], rows: int, groups: int, seed: int
) -> None:
    n, m = pattern
    weight = normal(rows, groups * m, seed=seed).mul(3).round()  # many are equal
    mask = n_of_m_mask(weight, n, m)
    for row, kept in zip(weight.tolist(), mask.tolist(), strict=True):
        for start in range(0, len(row), m):
            order = sorted(range(start, start + m), key=lambda i, row=row: -abs(row[i]))  # keeps the order of equals
            assert [i for i in range(start, start + m) if kept[i]] == sorted(order[:n])


def test_masks_work_for_any_dtype_and_strides() -> None:
    weight = normal(8, 12)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(n_of_m_mask(weight.to(dtype), 2, 4), n_of_m_mask(weight.to(dtype).float(), 2, 4))
        assert torch.equal(transposable_mask(weight.to(dtype), 2, 4), transposable_mask(weight.to(dtype).float(), 2, 4))
    transposed = weight.T.contiguous().T
    assert torch.equal(n_of_m_mask(transposed, 2, 4), n_of_m_mask(weight, 2, 4))
    assert torch.equal(transposable_mask(transposed, 2, 4), transposable_mask(weight, 2, 4))


def test_number_of_transposable_patterns() -> None:
    counts = {(n, m): len(transposable_patterns(n, m)) for m in (2, 3, 4) for n in range(1, m)}
    assert counts == {(1, 2): 2, (1, 3): 6, (2, 3): 6, (1, 4): 24, (2, 4): 90, (3, 4): 24}


@given(
    pattern=some.sampled_from([(1, 2), (2, 3), (1, 4), (2, 4)]),
    rows=some.integers(1, 2),
    columns=some.integers(1, 2),
    heavy=some.booleans(),
    seed=some.integers(0, 9999),
)
def test_transposable_mask_equals_brute_force(
    pattern: tuple[int, int], rows: int, columns: int, heavy: bool, seed: int
) -> None:
    n, m = pattern
    weight = normal(rows * m, columns * m, seed=seed)
    weight = weight**5 if heavy else weight
    mask = transposable_mask(weight, n, m)
    for i, j in itertools.product(range(rows), range(columns)):
        place = slice(i * m, i * m + m), slice(j * m, j * m + m)
        assert (mask[place].sum(0) == n).all() and (mask[place].sum(1) == n).all()
        kept = float((weight[place].abs() * mask[place]).double().sum())
        assert kept == pytest.approx(best_tile(weight[place], n), rel=1e-6)


def tiles(matrix: Tensor) -> Tensor:
    return matrix.unfold(0, 4, 4).unfold(1, 4, 4).flatten(0, 1).flatten(1)


def test_transposable_mask_keeps_at_least_torch_greedy_tiles() -> None:
    weight = normal(64, 64).abs()
    best, greedy = transposable_mask(weight, 2, 4), _sparse_semi_structured_tile(weight.clone()) != 0
    whole = tiles(greedy).sum(1) == 8  # some greedy tiles keep seven, which our patterns exclude
    kept, kept_greedily = (tiles(weight * mask).sum(1)[whole] for mask in (best, greedy))
    assert (kept >= kept_greedily - 1e-5).all() and (kept > kept_greedily + 1e-3).any()
    same = tiles(best == greedy).all(1)[whole]
    assert torch.equal(same, (kept - kept_greedily).abs() < 1e-5) and same.sum() > len(same) / 2


def test_many_tiles_are_scored_in_parts() -> None:
    weight = normal(4, 4 * (TILES_AT_ONCE + 4))
    mask = transposable_mask(weight, 2, 4)
    assert torch.equal(mask[:, -16:], transposable_mask(weight[:, -16:], 2, 4))


def test_masks_that_a_pattern_admits() -> None:
    assert NOfMPattern(2, 4).admits(torch.eye(4, dtype=torch.bool))  # fewer are allowed
    one_sided = torch.tensor([[1, 1, 0, 0]] * 4, dtype=torch.bool)
    assert NOfMPattern(2, 4).admits(one_sided) and not NOfMPattern(2, 4, transposable=True).admits(one_sided)
    assert not NOfMPattern(2, 4).admits(torch.tensor([[1, 1, 1, 0]], dtype=torch.bool))
    assert NOfMPattern(2, 4).fits((3, 8)) and not NOfMPattern(2, 4, transposable=True).fits((3, 8))
    assert not NOfMPattern(2, 4).fits((4, 6))


@pytest.mark.parametrize("n, m", [(0, 4), (4, 4), (5, 4)])
def test_patterns_without_choice_are_refused(n: int, m: int) -> None:
    with pytest.raises(UsageError, match="keeps no weights or all"):
        NOfMPattern(n, m)


def test_large_transposable_tiles_are_refused() -> None:
    with pytest.raises(RefusedError, match="116,963,796,250 for 4:8"):
        NOfMPattern(4, 8, transposable=True)


def test_masked_decay_is_gradient_of_masked_squared_norm() -> None:
    weight, gradient = normal(4, 8).requires_grad_(), normal(4, 8, seed=1)
    mask = n_of_m_mask(weight, 2, 4)
    actual = gradient.clone()
    add_masked_decay(actual, weight.detach(), mask, 0.3)
    (expected,) = torch.autograd.grad(0.3 * (weight * ~mask).square().sum() / 2, weight)
    torch.testing.assert_close(actual, gradient + expected)
    assert torch.equal(actual[mask], gradient[mask])


GROUP = some.lists(some.integers(-800, 800).map(lambda eighths: eighths / 8), min_size=4, max_size=4)


@given(group=GROUP, n=some.integers(1, 3))
@example(group=[0.0, 0.0, 0.0, 0.0], n=2)
@example(group=[1.0, 0.0, 0.0, 0.0], n=2)
@example(group=[100.0, 1.0, 1.0, 1.0], n=2)
def test_keep_probability_is_proportional_and_capped_at_1(group: list[float], n: int) -> None:
    numbers = torch.tensor(group, dtype=torch.float64)
    p = keep_probabilities(numbers, n)
    there = numbers != 0
    assert float(p.sum()) == pytest.approx(min(n, int(there.sum())), rel=1e-6) and bool((p <= 1).all())
    rates = (p / numbers.abs())[there & (p < 1 - 1e-12)]
    assert bool((p[there] > 0).all())
    if len(rates):
        assert float(rates.max()) == pytest.approx(float(rates.min()), rel=1e-6)
        assert bool((numbers.abs()[p >= 1 - 1e-12] * rates.max() >= 1 - 1e-6).all())


@given(group=GROUP, other=some.lists(some.floats(0.05, 1.0), min_size=4, max_size=4), n=some.integers(1, 3))
def test_keep_probabilities_have_the_least_variance(group: list[float], other: list[float], n: int) -> None:
    numbers = torch.tensor(group, dtype=torch.float64)
    q = torch.tensor(other, dtype=torch.float64)
    q = (q * min(1.0, n / float(q.sum()))).clamp_max(1.0)  # at most n elements on average
    p = keep_probabilities(numbers, n)
    least = (numbers.square() / p)[numbers != 0].sum()
    assert float(least) <= float((numbers.square() / q).sum()) * (1 + 1e-9)


@pytest.mark.parametrize("n, m", [(1, 2), (2, 4), (3, 8)])
def test_estimate_is_n_of_m_sparse_and_unbiased(n: int, m: int) -> None:
    samples, numbers = 40_000, normal(3 * m) * torch.logspace(-2, 1, 3 * m)
    generator = torch.Generator().manual_seed(0)
    actual = unbiased_estimate(numbers.expand(samples, -1), n, m, generator=generator)
    assert int((actual != 0).unflatten(-1, (-1, m)).sum(-1).max()) == n
    p = keep_probabilities(numbers.unflatten(0, (-1, m)).T, n).T.flatten()
    error = (numbers.square() * (1 / p - 1) / samples).sqrt()  # of the mean, for least-variance estimates
    assert bool(((actual.mean(0) - numbers).abs() <= 5 * error + 1e-4 * numbers.abs()).all())
    torch.testing.assert_close(actual.var(0), samples * error.square(), rtol=0.1, atol=1e-4)


def test_incomplete_group_is_estimated() -> None:
    numbers = normal(5, 6)
    actual = unbiased_estimate(numbers, 2, 4, generator=torch.Generator().manual_seed(0))
    assert actual.shape == numbers.shape
    torch.testing.assert_close(actual[:, 4:], numbers[:, 4:])  # two of two elements
    transposed = unbiased_estimate(numbers.T, 2, 4, dim=0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(transposed, actual.T)


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_value_makes_its_group_non_finite(wrong: float) -> None:
    numbers = normal(2, 8)
    numbers[0, 3] = wrong
    actual = unbiased_estimate(numbers, 2, 4, generator=torch.Generator().manual_seed(0))
    assert not actual[0, :4].isfinite().any() and actual[0, 4:].isfinite().all() and actual[1].isfinite().all()


@pytest.mark.parametrize("transposable", [False, True])
def test_gradient_is_straight_through_for_the_whole_weight(transposable: bool) -> None:
    x, weight, bias, upstream = normal(2, 5, 8), normal(12, 8, seed=1), normal(12, seed=2), normal(2, 5, 12, seed=3)
    pattern = NOfMPattern(transposable=transposable)
    mask = pattern.mask(weight)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    actual = masked_linear(leaves[0], leaves[1], mask, leaves[2], NOfMProducts(pattern))
    actual.backward(upstream)
    acting = (weight * mask).requires_grad_()
    others = [x.clone().requires_grad_(), acting, bias.clone().requires_grad_()]
    expected = F.linear(*others)
    expected.backward(upstream)
    assert torch.equal(actual, expected)
    for mine, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert leaves[1].grad is not None and bool((leaves[1].grad[~mask] != 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_after_masking(dtype: torch.dtype) -> None:
    x, weight = normal(6, 16).requires_grad_(), normal(8, 16, seed=1).requires_grad_()
    mask = n_of_m_mask(weight, 2, 4)
    with torch.autocast("cpu", dtype):
        actual = masked_linear(x, weight, mask, None, NOfMProducts(NOfMPattern()))
        expected = F.linear(x, weight * mask)
    assert actual.dtype == dtype and torch.equal(actual, expected)
    (mine,) = torch.autograd.grad(actual.float().sum(), weight, retain_graph=True)
    assert mine.dtype == torch.float32


def test_estimated_weight_gradient_is_unbiased_input_exact() -> None:
    pattern, samples = NOfMPattern(), 1500
    x, weight, upstream = normal(8, 4).requires_grad_(), normal(3, 4, seed=1).requires_grad_(), normal(8, 3, seed=2)
    mask = pattern.mask(weight)
    expected = torch.autograd.grad(masked_linear(x, weight, mask, None, NOfMProducts(pattern)), (x, weight), upstream)
    torch.manual_seed(0)
    sums = torch.zeros_like(weight)
    squares = torch.zeros_like(weight)
    for _ in range(samples):
        result = masked_linear(x, weight, mask, None, NOfMProducts(pattern, estimate=True))
        grad_x, grad_weight = torch.autograd.grad(result, (x, weight), upstream)
        assert torch.equal(grad_x, expected[0])
        sums += grad_weight
        squares += grad_weight.square()
    mean = sums / samples
    error = ((squares / samples - mean.square()) / samples).sqrt()
    assert float(error.max()) > 1e-3  # the estimate has variance
    assert bool(((mean - expected[1]).abs() < 5 * error + 1e-6).all())


def test_packed_matrix_is_contiguous_for_transposed_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def pack(matrix: Tensor) -> Tensor:
        packed.append(matrix)
        return matrix

    monkeypatch.setattr(n_of_m_linear, "to_sparse_semi_structured", pack)
    x, weight = normal(6, 128, dtype=torch.bfloat16), normal(128, 64, seed=1, dtype=torch.bfloat16).T
    mask = n_of_m_mask(weight, 2, 4)
    actual = masked_linear(x, weight, mask, None, NOfMProducts(NOfMPattern(), on_units=True))
    assert [matrix.is_contiguous() for matrix in packed] == [True] and not weight.is_contiguous()
    assert torch.equal(actual, F.linear(x, weight * mask))


def test_cpu_has_no_sparse_hardware() -> None:
    assert not has_sparse_units(torch.device("cpu"), NOfMPattern())


@pytest.fixture
def units_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Run torch's own packing and dispatch, but compute the sparse product from the packed matrix without hardware.

    Returns the list of shapes of these products.
    """
    seen: list[tuple[int, ...]] = []

    def product(packed: Tensor, meta: Tensor, dense: Tensor) -> Tensor:
        assert dense.is_contiguous() or dense.T.is_contiguous()
        matrix = sparse_semi_structured_to_dense_cutlass(packed, meta)
        seen.append((*matrix.shape, dense.shape[1]))
        return matrix @ dense

    def valid(kind: type[SparseSemiStructuredTensor], matrix: Tensor) -> None:
        least = kind._DTYPE_SHAPE_CONSTRAINTS[matrix.dtype]
        assert matrix.is_contiguous()
        assert matrix.shape[0] % least.sparse_min_rows == 0 and matrix.shape[1] % least.sparse_min_cols == 0

    monkeypatch.setattr(SparseSemiStructuredTensor, "_FORCE_CUTLASS", True)
    monkeypatch.setattr(SparseSemiStructuredTensorCUTLASS, "_validate_device_dim_dtype_shape", classmethod(valid))
    monkeypatch.setattr(torch, "_sparse_semi_structured_mm", product)
    monkeypatch.setattr(torch, "_sparse_semi_structured_addmm", lambda b, *given: product(*given) + b[:, None])
    return seen


def on_units_and_emulated(
    dtype: torch.dtype, pattern: NOfMPattern, estimate: bool, device: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the result and the gradients of input, weight and bias, on sparse hardware and emulated."""
    x, weight, bias, upstream = (
        normal(*shape, seed=seed, dtype=dtype).to(device)
        for seed, shape in enumerate([(128, 256), (384, 256), (384,), (128, 384)])
    )
    mask = pattern.mask(weight)
    results = []
    for on_units in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        torch.manual_seed(0)
        products = NOfMProducts(pattern, estimate, on_units)
        result = masked_linear(leaves[0], leaves[1], mask, leaves[2], products)
        result.backward(upstream)
        results.append([result, *(tensor.grad for tensor in leaves)])
    assert NOfMProducts(pattern, estimate, True).go_to_units(weight)
    return results[0], results[1]


EACH_VARIANT = [
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16]),
    pytest.mark.parametrize("transposable", [False, True]),
    pytest.mark.parametrize("estimate", [False, True]),
]


def each_variant(test: Callable[..., None]) -> Callable[..., None]:
    for mark in EACH_VARIANT:
        test = mark(test)
    return test


@each_variant
def test_packed_products_equal_emulation(
    dtype: torch.dtype, transposable: bool, estimate: bool, units_unpacked: list[tuple[int, ...]]
) -> None:
    results = on_units_and_emulated(dtype, NOfMPattern(transposable=transposable), estimate, "cpu")
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-1)
    for_x, for_weight = [(256, 384, 128)] * transposable, [(384, 128, 256)] * estimate
    assert units_unpacked == [(384, 256, 128), *for_x, *for_weight]


on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_sparse_units(torch.device("cuda"), NOfMPattern())),
    reason="no GPU with hardware for 2:4 products",
)


@on_a_gpu
@each_variant
def test_products_on_gpu_hardware_equal_emulation(dtype: torch.dtype, transposable: bool, estimate: bool) -> None:
    results = on_units_and_emulated(dtype, NOfMPattern(transposable=transposable), estimate, "cuda")
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-1)
