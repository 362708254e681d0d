"""N:M masks against brute force, the estimate of gradients against its expectation, the product against autograd."""

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


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def best_tile(tile: Tensor, n: int) -> float:
    """The largest sum of magnitudes that any choice of rows with n places each keeps, if columns have n too."""
    m = len(tile)
    magnitude = tile.abs().double().tolist()
    found = 0.0
    for rows in itertools.product(itertools.combinations(range(m), n), repeat=m):
        if all(sum(column in row for row in rows) == n for column in range(m)):
            found = max(found, sum(magnitude[i][j] for i, row in enumerate(rows) for j in row))
    return found


@given(
    pattern=some.sampled_from(PATTERNS),
    rows=some.integers(1, 4),
    groups=some.integers(1, 5),
    seed=some.integers(0, 9999),
)
def test_the_largest_of_each_group_are_kept_and_of_equal_ones_the_first(
    pattern: tuple[int, int], rows: int, groups: int, seed: int
) -> None:
    n, m = pattern
    weight = drawn(rows, groups * m, seed=seed).mul(3).round()  # many are equal
    mask = n_of_m_mask(weight, n, m)
    for row, kept in zip(weight.tolist(), mask.tolist(), strict=True):
        for start in range(0, len(row), m):
            order = sorted(range(start, start + m), key=lambda i, row=row: -abs(row[i]))  # keeps the order of equals
            assert [i for i in range(start, start + m) if kept[i]] == sorted(order[:n])


def test_masks_are_made_of_any_float_and_any_strides() -> None:
    weight = drawn(8, 12)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(n_of_m_mask(weight.to(dtype), 2, 4), n_of_m_mask(weight.to(dtype).float(), 2, 4))
        assert torch.equal(transposable_mask(weight.to(dtype), 2, 4), transposable_mask(weight.to(dtype).float(), 2, 4))
    turned = weight.T.contiguous().T
    assert torch.equal(n_of_m_mask(turned, 2, 4), n_of_m_mask(weight, 2, 4))
    assert torch.equal(transposable_mask(turned, 2, 4), transposable_mask(weight, 2, 4))


def test_there_are_as_many_transposable_patterns_as_known() -> None:
    counts = {(n, m): len(transposable_patterns(n, m)) for m in (2, 3, 4) for n in range(1, m)}
    assert counts == {(1, 2): 2, (1, 3): 6, (2, 3): 6, (1, 4): 24, (2, 4): 90, (3, 4): 24}


@given(
    pattern=some.sampled_from([(1, 2), (2, 3), (1, 4), (2, 4)]),
    rows=some.integers(1, 2),
    columns=some.integers(1, 2),
    heavy=some.booleans(),
    seed=some.integers(0, 9999),
)
def test_a_transposable_mask_keeps_as_much_as_brute_force_finds(
    pattern: tuple[int, int], rows: int, columns: int, heavy: bool, seed: int
) -> None:
    n, m = pattern
    weight = drawn(rows * m, columns * m, seed=seed)
    weight = weight**5 if heavy else weight
    mask = transposable_mask(weight, n, m)
    for i, j in itertools.product(range(rows), range(columns)):
        place = slice(i * m, i * m + m), slice(j * m, j * m + m)
        assert (mask[place].sum(0) == n).all() and (mask[place].sum(1) == n).all()
        kept = float((weight[place].abs() * mask[place]).double().sum())
        assert kept == pytest.approx(best_tile(weight[place], n), rel=1e-6)


def tiles(matrix: Tensor) -> Tensor:
    return matrix.unfold(0, 4, 4).unfold(1, 4, 4).flatten(0, 1).flatten(1)


def test_it_is_the_mask_of_torch_s_greedy_tiles_where_those_are_best_and_never_keeps_less() -> None:
    weight = drawn(64, 64).abs()
    best, greedy = transposable_mask(weight, 2, 4), _sparse_semi_structured_tile(weight.clone()) != 0
    whole = tiles(greedy).sum(1) == 8  # some greedy tiles end with seven, which is no pattern of ours
    kept, kept_greedily = (tiles(weight * mask).sum(1)[whole] for mask in (best, greedy))
    assert (kept >= kept_greedily - 1e-5).all() and (kept > kept_greedily + 1e-3).any()
    same = tiles(best == greedy).all(1)[whole]
    assert torch.equal(same, (kept - kept_greedily).abs() < 1e-5) and same.sum() > len(same) / 2


def test_many_tiles_are_the_same_in_parts() -> None:
    weight = drawn(4, 4 * (TILES_AT_ONCE + 4))
    mask = transposable_mask(weight, 2, 4)
    assert torch.equal(mask[:, -16:], transposable_mask(weight[:, -16:], 2, 4))


def test_what_a_pattern_admits() -> None:
    assert NOfMPattern(2, 4).admits(torch.eye(4, dtype=torch.bool))  # fewer is no harm
    one_sided = torch.tensor([[1, 1, 0, 0]] * 4, dtype=torch.bool)
    assert NOfMPattern(2, 4).admits(one_sided) and not NOfMPattern(2, 4, transposable=True).admits(one_sided)
    assert not NOfMPattern(2, 4).admits(torch.tensor([[1, 1, 1, 0]], dtype=torch.bool))
    assert NOfMPattern(2, 4).fits((3, 8)) and not NOfMPattern(2, 4, transposable=True).fits((3, 8))
    assert not NOfMPattern(2, 4).fits((4, 6))


@pytest.mark.parametrize("n, m", [(0, 4), (4, 4), (5, 4)])
def test_patterns_without_a_choice_are_refused(n: int, m: int) -> None:
    with pytest.raises(UsageError, match="keeps none or all"):
        NOfMPattern(n, m)


def test_large_transposable_tiles_are_refused_with_the_reason() -> None:
    with pytest.raises(RefusedError, match="of 8 x 8 116,963,796,250"):
        NOfMPattern(4, 8, transposable=True)


def test_masked_decay_is_the_gradient_of_half_the_squared_norm_of_what_is_masked() -> None:
    weight, gradient = drawn(4, 8).requires_grad_(), drawn(4, 8, seed=1)
    mask = n_of_m_mask(weight, 2, 4)
    found = gradient.clone()
    add_masked_decay(found, weight.detach(), mask, 0.3)
    (wanted,) = torch.autograd.grad(0.3 * (weight * ~mask).square().sum() / 2, weight)
    torch.testing.assert_close(found, gradient + wanted)
    assert torch.equal(found[mask], gradient[mask])


GROUP = some.lists(some.integers(-800, 800).map(lambda eighths: eighths / 8), min_size=4, max_size=4)


@given(group=GROUP, n=some.integers(1, 3))
@example(group=[0.0, 0.0, 0.0, 0.0], n=2)
@example(group=[1.0, 0.0, 0.0, 0.0], n=2)
@example(group=[100.0, 1.0, 1.0, 1.0], n=2)
def test_numbers_are_kept_in_proportion_to_their_size_capped_at_certainty(group: list[float], n: int) -> None:
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
def test_no_other_probabilities_have_less_variance(group: list[float], other: list[float], n: int) -> None:
    numbers = torch.tensor(group, dtype=torch.float64)
    q = torch.tensor(other, dtype=torch.float64)
    q = (q * min(1.0, n / float(q.sum()))).clamp_max(1.0)  # n places at most, on average
    p = keep_probabilities(numbers, n)
    least = (numbers.square() / p)[numbers != 0].sum()
    assert float(least) <= float((numbers.square() / q).sum()) * (1 + 1e-9)


@pytest.mark.parametrize("n, m", [(1, 2), (2, 4), (3, 8)])
def test_the_estimate_is_n_of_m_and_unbiased(n: int, m: int) -> None:
    draws, numbers = 40_000, drawn(3 * m) * torch.logspace(-2, 1, 3 * m)
    generator = torch.Generator().manual_seed(0)
    found = unbiased_estimate(numbers.expand(draws, -1), n, m, generator=generator)
    assert int((found != 0).unflatten(-1, (-1, m)).sum(-1).max()) == n
    p = keep_probabilities(numbers.unflatten(0, (-1, m)).T, n).T.flatten()
    error = (numbers.square() * (1 / p - 1) / draws).sqrt()  # of the mean, by the variance of least-variance estimates
    assert bool(((found.mean(0) - numbers).abs() <= 5 * error + 1e-4 * numbers.abs()).all())
    torch.testing.assert_close(found.var(0), draws * error.square(), rtol=0.1, atol=1e-4)


def test_what_does_not_fill_a_group_is_estimated_too() -> None:
    numbers = drawn(5, 6)
    found = unbiased_estimate(numbers, 2, 4, generator=torch.Generator().manual_seed(0))
    assert found.shape == numbers.shape
    torch.testing.assert_close(found[:, 4:], numbers[:, 4:])  # two of at most two places
    turned = unbiased_estimate(numbers.T, 2, 4, dim=0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned, found.T)


@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_none_is_not_lost_in_the_estimate(wrong: float) -> None:
    numbers = drawn(2, 8)
    numbers[0, 3] = wrong
    found = unbiased_estimate(numbers, 2, 4, generator=torch.Generator().manual_seed(0))
    assert not found[0, :4].isfinite().any() and found[0, 4:].isfinite().all() and found[1].isfinite().all()


@pytest.mark.parametrize("transposable", [False, True])
def test_the_gradient_goes_straight_through_to_the_whole_weight(transposable: bool) -> None:
    x, weight, bias, upstream = drawn(2, 5, 8), drawn(12, 8, seed=1), drawn(12, seed=2), drawn(2, 5, 12, seed=3)
    pattern = NOfMPattern(transposable=transposable)
    mask = pattern.mask(weight)
    given_ones = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    found = masked_linear(given_ones[0], given_ones[1], mask, given_ones[2], NOfMProducts(pattern))
    found.backward(upstream)
    acting = (weight * mask).requires_grad_()
    others = [x.clone().requires_grad_(), acting, bias.clone().requires_grad_()]
    wanted = F.linear(*others)
    wanted.backward(upstream)
    assert torch.equal(found, wanted)
    for mine, theirs in zip(given_ones, others, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert given_ones[1].grad is not None and bool((given_ones[1].grad[~mask] != 0).any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_whole_weight_is_masked_and_then_rounded(dtype: torch.dtype) -> None:
    x, weight = drawn(6, 16).requires_grad_(), drawn(8, 16, seed=1).requires_grad_()
    mask = n_of_m_mask(weight, 2, 4)
    with torch.autocast("cpu", dtype):
        found = masked_linear(x, weight, mask, None, NOfMProducts(NOfMPattern()))
        wanted = F.linear(x, weight * mask)
    assert found.dtype == dtype and torch.equal(found, wanted)
    (mine,) = torch.autograd.grad(found.float().sum(), weight, retain_graph=True)
    assert mine.dtype == torch.float32


def test_with_the_estimate_the_weight_s_gradient_is_right_on_average_and_the_input_s_always() -> None:
    pattern, draws = NOfMPattern(), 1500
    x, weight, upstream = drawn(8, 4).requires_grad_(), drawn(3, 4, seed=1).requires_grad_(), drawn(8, 3, seed=2)
    mask = pattern.mask(weight)
    wanted = torch.autograd.grad(masked_linear(x, weight, mask, None, NOfMProducts(pattern)), (x, weight), upstream)
    torch.manual_seed(0)
    sums = torch.zeros_like(weight)
    squares = torch.zeros_like(weight)
    for _ in range(draws):
        result = masked_linear(x, weight, mask, None, NOfMProducts(pattern, estimate=True))
        of_x, of_weight = torch.autograd.grad(result, (x, weight), upstream)
        assert torch.equal(of_x, wanted[0])
        sums += of_weight
        squares += of_weight.square()
    mean = sums / draws
    error = ((squares / draws - mean.square()) / draws).sqrt()
    assert float(error.max()) > 1e-3  # it is an estimate
    assert bool(((mean - wanted[1]).abs() < 5 * error + 1e-6).all())


def test_what_is_packed_is_contiguous_even_of_a_weight_that_is_kept_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def pack(matrix: Tensor) -> Tensor:
        packed.append(matrix)
        return matrix

    monkeypatch.setattr(n_of_m_linear, "to_sparse_semi_structured", pack)
    x, weight = drawn(6, 128, dtype=torch.bfloat16), drawn(128, 64, seed=1, dtype=torch.bfloat16).T
    mask = n_of_m_mask(weight, 2, 4)
    found = masked_linear(x, weight, mask, None, NOfMProducts(NOfMPattern(), on_units=True))
    assert [matrix.is_contiguous() for matrix in packed] == [True] and not weight.is_contiguous()
    assert torch.equal(found, F.linear(x, weight * mask))


def test_no_device_but_a_gpu_has_units_for_it() -> None:
    assert not has_sparse_units(torch.device("cpu"), NOfMPattern())


@pytest.fixture
def units_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Torch's own packing and its way to the units, all but the units: their product is made of what was packed. What
    they are given is listed."""
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
    """The result and the gradients of input, weight and bias, both ways."""
    x, weight, bias, upstream = (
        drawn(*shape, seed=seed, dtype=dtype).to(device)
        for seed, shape in enumerate([(128, 256), (384, 256), (384,), (128, 384)])
    )
    mask = pattern.mask(weight)
    found = []
    for on_units in (True, False):
        given_ones = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        torch.manual_seed(0)
        products = NOfMProducts(pattern, estimate, on_units)
        result = masked_linear(given_ones[0], given_ones[1], mask, given_ones[2], products)
        result.backward(upstream)
        found.append([result, *(tensor.grad for tensor in given_ones)])
    assert NOfMProducts(pattern, estimate, True).go_to_units(weight)
    return found[0], found[1]


EACH_WAY = [
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16]),
    pytest.mark.parametrize("transposable", [False, True]),
    pytest.mark.parametrize("estimate", [False, True]),
]


def each_way(test: Callable[..., None]) -> Callable[..., None]:
    for mark in EACH_WAY:
        test = mark(test)
    return test


@each_way
def test_what_is_packed_for_the_units_is_all_that_acts(
    dtype: torch.dtype, transposable: bool, estimate: bool, units_unpacked: list[tuple[int, ...]]
) -> None:
    found = on_units_and_emulated(dtype, NOfMPattern(transposable=transposable), estimate, "cpu")
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-1)
    of_x, of_weight = [(256, 384, 128)] * transposable, [(384, 128, 256)] * estimate
    assert units_unpacked == [(384, 256, 128), *of_x, *of_weight]


on_a_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_sparse_units(torch.device("cuda"), NOfMPattern())),
    reason="no GPU with units for 2:4 products",
)


@on_a_gpu
@each_way
def test_products_on_a_gpu_s_units_are_those_of_the_emulation(
    dtype: torch.dtype, transposable: bool, estimate: bool
) -> None:
    found = on_units_and_emulated(dtype, NOfMPattern(transposable=transposable), estimate, "cuda")
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-1)
