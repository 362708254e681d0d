"""Attention over kept pairs compared with a masked dense product: values, gradients, memory, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import kept_attention_reference, pairs_of
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import (
    NONE,
    PART,
    WHOLE,
    BlockGrid,
    blocks_of,
    scattered_grid,
    window_grid,
)
from thrifty.kernels.sparse_attention.row_attention import row_attention
from thrifty.kernels.sparse_attention.visibility import VisibilityRule
from thrifty.kernels.tiled_attention import segment_mask


def inputs(b: int, h: int, g: int, t: int, k: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, n, t, k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for n in (h, g, g)
    ]


def with_gradients(output: Tensor, qkv: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, qkv, weights)]


def assert_like_dense(actual: Tensor, qkv: list[Tensor], keep: Tensor, **near: float) -> None:
    expected = with_gradients(kept_attention_reference(*qkv, keep), qkv)
    torch.testing.assert_close(with_gradients(actual, qkv), expected, **near)


def grid_of(keep: Tensor, block: int) -> BlockGrid:
    """Return a grid of the blocks of a mask (b or 1, h or 1, t, s) with a kept pair."""
    rows, columns = (blocks_of(size, block) for size in keep.shape[-2:])
    codes = torch.zeros(*keep.shape[:2], rows, columns, dtype=torch.int8)
    for *head, row, column in keep.nonzero().tolist():
        codes[(*head, row // block, column // block)] = WHOLE
    return BlockGrid(codes, block, int((codes != NONE).sum((-1, -2)).max()))


def keys_of(keep: Tensor) -> Tensor:
    """Return the key indices that a mask (b or 1, h or 1, t, s) keeps for each query, and -1 for the others."""
    return torch.where(keep, torch.arange(keep.shape[-1]), -1)


SHAPES = {
    "b": st.integers(1, 2),
    "g": st.integers(1, 2),
    "sharing": st.integers(1, 3),
    "t": st.integers(1, 40),
    "k": st.integers(1, 6),
    "block": st.integers(1, 17),
    "seed": st.integers(0, 99),
}


@settings(max_examples=25, deadline=None)
@given(**SHAPES, causal=st.booleans(), window=st.integers(0, 20), first=st.integers(0, 9))
def test_window_grids_equal_masked_attention(b, g, sharing, t, k, block, seed, causal, window, first):
    qkv, sight = inputs(b, g * sharing, g, t, k, seed=seed), VisibilityRule(causal, window, first)
    place = torch.arange(t)
    keep = sight.visible(place[:, None], place[None, :])
    assert_like_dense(block_attention(*qkv, window_grid(t, sight, block)), qkv, keep)


@settings(max_examples=25, deadline=None)
@given(**SHAPES, causal=st.booleans(), near=st.integers(0, 2), first=st.integers(0, 2), drawn=st.integers(0, 3))
def test_scattered_grids_with_segments_equal_masked_attention(
    b, g, sharing, t, k, block, seed, causal, near, first, drawn
):
    qkv, grid = inputs(b, g * sharing, g, t, k, seed=seed), scattered_grid(t, block, near, first, drawn, causal, seed)
    segments = torch.randint(0, 4, (b, t), generator=torch.Generator().manual_seed(seed)).sort(1).values
    keep = pairs_of(grid, t, t)
    assert_like_dense(block_attention(*qkv, grid), qkv, keep)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    assert_like_dense(block_attention(*qkv, grid, segments=segments), qkv, keep & same)
    if causal:  # in the form in which our models pass it
        assert_like_dense(block_attention(*qkv, grid, segment_mask(segments)), qkv, keep & same)


@settings(max_examples=25, deadline=None)
@given(**SHAPES, density=st.floats(0, 1), per_head=st.booleans())
def test_any_mask_in_blocks_or_rows_equals_dense_product(b, g, sharing, t, k, block, seed, density, per_head):
    h, generator = g * sharing, torch.Generator().manual_seed(seed)
    qkv = inputs(b, h, g, t, k, seed=seed)
    keep = torch.rand(b, h if per_head else 1, t, t, generator=generator) < density  # some queries without a key
    assert_like_dense(block_attention(*qkv, grid_of(keep, block), keep), qkv, keep)
    assert_like_dense(row_attention(*qkv, keys_of(keep)), qkv, keep)


@settings(max_examples=20, deadline=None)
@given(b=st.integers(1, 2), g=st.integers(1, 2), sharing=st.integers(1, 2), t=st.integers(1, 30), s=st.integers(1, 30),
       kept=st.integers(1, 8), seed=st.integers(0, 99))  # fmt: skip
def test_row_attention_equals_dense_product(b, g, sharing, t, s, kept, seed):
    h, generator = g * sharing, torch.Generator().manual_seed(seed)
    q = inputs(b, h, g, t, 3, seed=seed)[0]
    k, v = inputs(b, g, g, s, 3, seed=seed + 1)[1:]
    keys = torch.rand(b, h, t, s, generator=generator).topk(min(kept, s)).indices
    keys = torch.where(torch.rand(keys.shape, generator=generator) < 0.2, -1, keys)
    keep = torch.zeros(b, h, t, s + 1, dtype=torch.bool).scatter(-1, torch.where(keys < 0, s, keys), True)[..., :s]
    assert_like_dense(row_attention(q, k, v, keys), [q, k, v], keep)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_float32_results_are_within_1e_5_of_dense_product(causal):
    qkv = inputs(1, 4, 2, 200, 32, torch.float32)
    grid = scattered_grid(200, 32, 0, 1, 1, causal)
    keep = pairs_of(grid, 200, 200)
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_like_dense(block_attention(*qkv, grid), qkv, keep, **near)
    assert_like_dense(row_attention(*qkv, keys_of(keep)), qkv, keep, **near)


@settings(max_examples=60, deadline=None)
@given(t=st.integers(1, 60), block=st.integers(1, 9), causal=st.booleans(), window=st.integers(0, 30),
       first=st.integers(0, 20))  # fmt: skip
def test_grid_codes_match_visible_pairs_of_each_block(t, block, causal, window, first):
    sight = VisibilityRule(causal, window, first)
    side = -(-t // block)
    place = torch.arange(side * block)
    seen = sight.visible(place[:, None], place[None, :]).expand(len(place), len(place)).view(side, block, side, block)
    grid = window_grid(t, sight, block)
    some, all_ = seen.any(3).any(1), seen.all(3).all(1)
    assert torch.equal(grid.codes[0, 0] == NONE, ~some)
    assert bool(all_[grid.codes[0, 0] == WHOLE].all())  # PART for a whole block costs a mask but is right
    assert grid.count == int(some.sum())


def test_only_blocks_at_window_edges_need_a_mask():
    codes = window_grid(32, VisibilityRule(True, 12), 4).codes[0, 0]
    assert codes[5].tolist() == [NONE, NONE, PART, WHOLE, WHOLE, PART, NONE, NONE]
    assert window_grid(32, VisibilityRule(), 4).codes.eq(WHOLE).all()


@settings(max_examples=40, deadline=None)
@given(t=st.integers(1, 60), block=st.integers(1, 9), near=st.integers(0, 3), first=st.integers(0, 3),
       drawn=st.integers(0, 4), causal=st.booleans())  # fmt: skip
def test_scattered_grid_has_its_count_and_required_blocks(t, block, near, first, drawn, causal):
    grid = scattered_grid(t, block, near, first, drawn, causal, seed=3)
    kept = grid.codes[0, 0] != NONE
    assert int(kept.sum()) == grid.count
    for i in range(len(kept)):
        must = {j for j in range(len(kept)) if (not causal or j <= i) and (abs(i - j) <= near or min(i, j) < first)}
        actual = set(kept[i].nonzero().flatten().tolist())
        assert must <= actual
        assert len(actual - must) == min(drawn, (i + 1 if causal else len(kept)) - len(must)) * (i >= first)


@pytest.mark.parametrize("drawn", [1, 3])
def test_causal_scattered_grid_is_a_prefix_of_longer_ones(drawn: int) -> None:
    long = scattered_grid(400, 8, 1, 1, drawn, causal=True, seed=5).codes[0, 0]
    for tokens in (8, 57, 64, 200):
        codes = scattered_grid(tokens, 8, 1, 1, drawn, causal=True, seed=5).codes[0, 0]
        assert torch.equal(codes, long[: len(codes), : len(codes)])


def test_saved_memory_grows_with_kept_pairs_only():
    b, h, t, k = 1, 2, 1024, 16
    qkv = inputs(b, h, h, t, k, torch.float32)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    keys = torch.arange(t)[:, None].sub(torch.arange(8)).clamp(min=-1)[None, None]
    grid = window_grid(t, VisibilityRule(True, 64), 32)
    for core, extra in ((lambda: block_attention(*qkv, grid), grid.codes), (lambda: row_attention(*qkv, keys), keys)):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            core()
        inputs_and_output, lse = 4 * b * h * t * k * 4, b * h * t * 4
        assert sum(saved.values()) <= inputs_and_output + lse + extra.numel() * extra.element_size() < h * t * t * 4


def test_bfloat16_is_as_accurate_as_the_dense_product():
    qkv = inputs(1, 4, 2, 200, 32, torch.bfloat16)
    grid = scattered_grid(200, 32, 1, 1, 1, True)
    keep = pairs_of(grid, 200, 200)
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    exact = with_gradients(kept_attention_reference(*doubles, keep), doubles)

    def errors(actual: Tensor) -> list[float]:
        pairs = zip(with_gradients(actual, qkv), exact, strict=True)
        return [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]

    dense = errors(kept_attention_reference(*qkv, keep))
    assert all(
        mine < max(1.5 * theirs, 5e-3) for mine, theirs in zip(errors(block_attention(*qkv, grid)), dense, strict=True)
    )


def test_gradients_equal_finite_differences():
    qkv = inputs(1, 2, 1, 9, 2)
    grid = window_grid(9, VisibilityRule(True, 4, 1), 4)
    assert torch.autograd.gradcheck(lambda *qkv: block_attention(*qkv, grid), qkv)
    keys = torch.tensor([[0, -1, 3], *[[1, 2, 0]] * 8])[None, None]
    assert torch.autograd.gradcheck(lambda *qkv: row_attention(*qkv, keys), qkv)


def test_large_scores_do_not_overflow():
    q, k, v = inputs(1, 2, 2, 40, 8, torch.float32)
    grid = window_grid(40, VisibilityRule(True, 9), 8)
    actual = with_gradients(block_attention(q * 1e3, k * 1e3, v, grid), [q, k, v])
    assert all(tensor.isfinite().all() for tensor in actual)


def test_result_is_independent_of_thread_count():
    qkv, grid = inputs(2, 4, 2, 300, 16, torch.float32), scattered_grid(300, 16, 1, 1, 3, True)
    actual, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            actual.append(with_gradients(block_attention(*qkv, grid), qkv))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*actual, strict=True))


def test_compiled_equals_eager_in_values_and_gradients():
    qkv = inputs(1, 2, 1, 24, 8, torch.float32)

    sight = VisibilityRule(True, 7)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_attention(q, k, v, window_grid(24, sight, 8))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled(*qkv), qkv), with_gradients(attend(*qkv), qkv))


def test_meta_tensors_suffice_and_flops_count_kept_blocks():
    q = torch.empty(2, 4, 64, 8, device="meta", requires_grad=True)
    grid = window_grid(64, VisibilityRule(True, 16), 16, torch.device("meta"))
    block_attention(q, q, q, grid).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
    count = FLOPS_OF[torch.ops.thrifty.block_attention](q, q, q, grid.codes, None, None, 16, grid.count)
    assert count == 2 * 2 * 2 * 4 * grid.count * 16**2 * 8
    assert grid.count == 7  # four on the diagonal, three next to it


def test_values_may_have_another_width_than_keys():
    qkv, grid = [*inputs(1, 4, 2, 12, 4)[:2], inputs(1, 4, 2, 12, 6)[2]], window_grid(12, VisibilityRule(True), 4)
    keep = pairs_of(grid, 12, 12)
    assert_like_dense(block_attention(*qkv, grid), qkv, keep)
    assert_like_dense(row_attention(*qkv, keys_of(keep)), qkv, keep)
    fakes = [torch.empty_like(each, device="meta") for each in qkv]
    on_meta = window_grid(12, VisibilityRule(True), 4, torch.device("meta"))
    assert block_attention(*fakes, on_meta).shape == (1, 4, 12, 6)
    assert row_attention(*fakes, keys_of(keep).to("meta")).shape == (1, 4, 12, 6)


def test_products_beyond_the_range_of_float16_are_scaled_first():
    q, k = (torch.full((1, 1, 8, 64), 40.0, dtype=torch.float16, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    output = block_attention(q, k, v, window_grid(8, VisibilityRule(causal=True), 4))
    mean = v.detach().float().cumsum(2) / torch.arange(1, 9)[:, None]
    torch.testing.assert_close(output.float(), mean, rtol=2e-3, atol=2e-3)
    assert all(each.isfinite().all() for each in with_gradients(output, [q, k, v]))


def test_second_derivative_is_refused():
    qkv = inputs(1, 1, 1, 8, 4)
    for output in (
        block_attention(*qkv, window_grid(8, VisibilityRule(True), 4)),
        row_attention(*qkv, torch.zeros(1, 1, 8, 1).long()),
    ):
        with pytest.raises(UsageError, match="no second derivative"):
            torch.autograd.grad(output.sum(), qkv[0], create_graph=True)


def test_grids_and_keys_that_do_not_fit_are_refused():
    qkv = inputs(1, 2, 2, 8, 4)
    with pytest.raises(UsageError, match="a grid of"):
        block_attention(*qkv, BlockGrid(torch.ones(1, 1, 3, 2, dtype=torch.int8), 4, 6))
    with pytest.raises(UsageError, match="kept keys have"):
        row_attention(*qkv, torch.zeros(1, 1, 8, 2))
    with pytest.raises(UsageError, match="kept key 9 does not exist: there are 8 keys"):
        row_attention(*qkv, torch.full((1, 1, 8, 1), 9))


def test_autocast_accepts_inputs_of_mixed_dtypes():
    q, k, v = (each.detach().float() for each in inputs(1, 2, 1, 12, 4))
    grid, keys = window_grid(12, VisibilityRule(causal=True), 4), torch.arange(12).expand(1, 1, 12, 12).contiguous()
    with torch.autocast("cpu", torch.bfloat16):
        actual = block_attention(q, k, v.bfloat16(), grid)
        rows = row_attention(q, k, v.bfloat16(), keys)
        whole = torch.nn.functional.scaled_dot_product_attention(q, k, v.bfloat16(), enable_gqa=True)
    assert actual.dtype == rows.dtype == whole.dtype == torch.bfloat16
    torch.testing.assert_close(rows, whole, atol=0.02, rtol=0.02)
