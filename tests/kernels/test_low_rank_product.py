"""Low-rank additions compared with the plain formula."""

import pytest
import torch
from kernel_references import add_low_rank_reference
from torch import Tensor

from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.kernels.low_rank_product import add_low_rank, low_rank_product, on_diagonal


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 3, 4)])
def test_values_and_gradients_equal_the_formula(leading: tuple[int, ...]) -> None:
    inputs = tensors((*leading, 5), (*leading, 6), (2, 6), (5, 2))
    actual, expected = add_low_rank(*inputs, 0.5), add_low_rank_reference(*inputs, 0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (actual, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    result, x, a, b = inputs
    torch.testing.assert_close(expected, result + 0.5 * x @ (b @ a).T)


def test_zero_factor_changes_no_bit_in_any_dtype() -> None:
    result, x, a, b = tensors((7, 5), (7, 6), (2, 6), (5, 2), dtype=torch.float32)
    for low in (torch.float32, torch.bfloat16, torch.float16):
        start = result.to(low)
        for factors in (torch.float32, low):
            added = add_low_rank(start, x.to(low), a.to(factors), torch.zeros_like(b, dtype=factors), 2.0)
            assert torch.equal(added, start) and added.dtype == low
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(add_low_rank(start, x, a, torch.zeros_like(b), 2.0), start)


def test_sum_uses_the_dtype_of_wider_factors() -> None:
    result, x, a, b = tensors((7, 5), (7, 6), (2, 6), (5, 2), dtype=torch.float32)
    low = result.bfloat16()
    actual = add_low_rank(low, x.bfloat16(), a, b, 2.0)
    expected = add_low_rank_reference(low.float(), x.bfloat16().float(), a, b, 2.0)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected.bfloat16())


def test_memory_is_below_the_formula_without_wide_saved_tensor() -> None:
    def traced(add: object) -> tuple[int, int]:
        x, a, b, weight = tensors((64, 32), (2, 32), (256, 2), (256, 32), dtype=torch.float32)
        with gc_disabled(), StepTrace(x, a, b, weight) as trace:
            output = add(torch.nn.functional.linear(x, weight.detach()), x, a, b, 0.5)  # type: ignore[operator]
            kept = trace.now
            output.sum().backward()
        return kept, trace.peak

    (kept, peak), (same, more) = traced(add_low_rank), traced(add_low_rank_reference)
    wide, thin = 64 * 256 * 4, 64 * 2 * 4
    assert kept == same == wide + thin  # the output and x Aᵀ
    assert peak < more


def test_product_is_in_float32_or_wider() -> None:
    a, b = tensors((2, 6), (5, 2), dtype=torch.bfloat16)
    assert torch.equal(low_rank_product(a, b, 0.5), b.float() @ a.float() * 0.5)
    assert low_rank_product(a.double(), b.double(), 0.5).dtype == torch.float64


def test_fused_factors_equal_separate_layers() -> None:
    x, a, b = tensors((7, 6), (4, 6), (9, 2))
    spread = on_diagonal(b, (5, 3, 4), (0, 2))
    actual = add_low_rank(x.new_zeros(7, 12), x, a, spread, 1.0)
    first, last = x @ (b[:5] @ a[:2]).T, x @ (b[5:] @ a[2:]).T
    torch.testing.assert_close(actual, torch.cat((first, x.new_zeros(7, 3), last), 1))
