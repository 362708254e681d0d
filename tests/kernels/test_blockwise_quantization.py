"""Blockwise 8-bit quantization: the paper's code book, errors, masks on codes, and independence of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels.blockwise_quantization import (
    CodeBook,
    block_count,
    code_book,
    dequantize,
    dynamic_values,
    quantize,
)

BOOKS = {signed: code_book(signed) for signed in (True, False)}
SEEDS = torch.arange(-(2**15), 2**15).to(torch.int16)[:, None]


def value_of_bits(magnitude: int, bits: int) -> float:
    """Return a value by section 1.3 of the paper. The number of leading zeros is a power of ten and a 1 ends them. The
    remaining bits are a linear fraction: the midpoint of one of that many equal parts of [0.1, 1]."""
    leading = bits - magnitude.bit_length()
    parts = 2 ** (magnitude.bit_length() - 1)
    return 10.0**-leading * (0.1 + 0.9 * (magnitude - parts + 0.5) / parts)


def numbers(rows: int, columns: int, signed: bool, seed: int, spread: float = 3.0) -> Tensor:
    """Return random values over several decades."""
    generator = torch.Generator().manual_seed(seed)
    normal, sizes = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    actual = normal * torch.exp(spread * sizes)
    return actual if signed else actual.abs()


def nearest_values(expected: Tensor, book: CodeBook, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each element the nearest value of the code book, and the distance between its neighbors there."""
    size = -(-expected.shape[1] // scales.shape[1])
    each = scales.double().repeat_interleave(size, 1)[:, : expected.shape[1]]
    relative = (expected.double() / each)[..., None]
    values = book.values.double().sort().values
    chosen = (relative - values).abs().argmin(-1)
    gaps = torch.maximum(values.diff(append=values[-1:]), values.diff(prepend=values[:1]))
    return values[chosen] * each, gaps[chosen] * each.abs()


def test_code_book_equals_paper() -> None:
    positive = [value_of_bits(magnitude, 7) for magnitude in range(1, 128)]
    signed = sorted([0.0, 1.0, *positive, *(-value for value in positive)])
    unsigned = sorted([0.0, 1.0, *(value_of_bits(magnitude, 8) for magnitude in range(2, 256))])
    torch.testing.assert_close(dynamic_values(True), torch.tensor(signed, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(dynamic_values(False), torch.tensor(unsigned, dtype=torch.float64), rtol=1e-12, atol=0)
    assert len(signed) == len(unsigned) == 256


@pytest.mark.parametrize("signed", BOOKS)
def test_code_0_is_zero_and_codes_ascend_around_it(signed: bool) -> None:
    values = BOOKS[signed].values
    assert values[0] == 0
    ascending = torch.cat([values[129:], values[:129]]) if signed else values
    assert (ascending.diff() > 0).all()


@settings(max_examples=60)
@given(
    rows=some.integers(1, 5),
    columns=some.sampled_from([1, 16, 255, 256, 257, 509, 600, 1216]),
    signed=some.booleans(),
    seed=some.integers(0, 10_000),
)
def test_each_element_gets_the_nearest_code(rows: int, columns: int, signed: bool, seed: int) -> None:
    book, expected = BOOKS[signed], numbers(rows, columns, signed, seed)
    codes, scales = quantize(expected, book)
    actual = dequantize(codes, scales, book).double()
    nearest, gaps = nearest_values(expected, book, scales)
    rounding = 2 * (gaps / 512 + expected.abs() * 2**-11)  # twice, because one code gets nearer and the other farther
    vanishing = (nearest == 0) & (expected != 0)
    error, least = (actual - expected).abs(), (nearest - expected).abs()
    assert ((error <= least + rounding) | vanishing).all()
    torch.testing.assert_close(actual[vanishing].abs(), gaps[vanishing], rtol=1e-6, atol=0)
    assert torch.equal(actual.sign(), expected.double().sign())


@pytest.mark.parametrize(("signed", "half_the_widest_gap"), [(True, 0.0073), (False, 0.0038)])
def test_error_of_a_block_is_bounded_by_its_largest_magnitude(signed: bool, half_the_widest_gap: float) -> None:
    expected = numbers(20, 512, signed, seed=1, spread=1.0)
    error = (dequantize(*quantize(expected, BOOKS[signed]), BOOKS[signed]) - expected).abs().view(20, 2, 256).amax(-1)
    largest = expected.abs().view(20, 2, 256).amax(-1)
    assert (error <= half_the_widest_gap * largest).all()
    assert (error >= 0.5 * half_the_widest_gap * largest).any()


@pytest.mark.parametrize("signed", BOOKS)
def test_quantizing_dequantized_values_restores_the_codes(signed: bool) -> None:
    book = BOOKS[signed]
    codes, scales = quantize(numbers(8, 509, signed, seed=2), book)
    again = quantize(dequantize(codes, scales, book), book)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@pytest.mark.parametrize("signed", BOOKS)
def test_largest_magnitude_of_a_block_is_exact(signed: bool) -> None:
    expected = numbers(50, 256, signed, seed=3)
    place = expected.abs().argmax(1, keepdim=True)
    for seed in (None, -5, 1234):
        actual = dequantize(*quantize(expected, BOOKS[signed], seed), BOOKS[signed])
        assert torch.equal(actual.gather(1, place), expected.gather(1, place))


@settings(max_examples=25)
@given(share=some.floats(2**-19, 1, width=32), signed=some.booleans(), negative=some.booleans())
def test_stochastic_rounding_is_unbiased(share: float, signed: bool, negative: bool) -> None:
    book, expected = BOOKS[signed], max(-share, -0.99) if negative and signed else share
    rows = torch.tensor([[expected, 1.0]]).repeat(2**16, 1)
    actual = dequantize(*quantize(rows, book, SEEDS), book)[:, 0].double()
    assert len(actual.unique()) <= 2
    _, gaps = nearest_values(rows[:1], book, torch.ones(1, 1))
    assert abs(float(actual.mean()) - expected) <= float(gaps[0, 0]) / 256 + abs(expected) * 2**-11


@pytest.mark.parametrize("signed", BOOKS)
@pytest.mark.parametrize("seed", [None, 321])
def test_rows_are_quantized_independently(signed: bool, seed: int | None) -> None:
    expected = numbers(7, 600, signed, seed=4)
    codes, scales = quantize(expected, BOOKS[signed], seed)
    for part in (slice(0, 3), slice(3, 7)):
        alone = quantize(expected[part], BOOKS[signed], seed)
        assert torch.equal(alone[0], codes[part]) and torch.equal(alone[1], scales[part])


def test_trailing_dims_are_one_row() -> None:
    expected = numbers(6, 120, True, seed=5)
    codes, scales = quantize(expected.view(6, 5, 4, 6), BOOKS[True])
    assert codes.shape == (6, 5, 4, 6) and scales.shape == (6, 1)
    flat = quantize(expected, BOOKS[True])
    assert torch.equal(codes.view(6, 120), flat[0])
    assert torch.equal(dequantize(codes, scales, BOOKS[True]).view(6, 120), dequantize(*flat, BOOKS[True]))


@pytest.mark.parametrize("signed", BOOKS)
def test_mask_on_codes_masks_the_values(signed: bool) -> None:
    codes, scales = quantize(numbers(4, 300, signed, seed=6), BOOKS[signed])
    mask = torch.rand(4, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    masked = dequantize(codes * mask, scales, BOOKS[signed])
    assert torch.equal(masked, dequantize(codes, scales, BOOKS[signed]) * mask)


@pytest.mark.parametrize("signed", BOOKS)
def test_any_magnitude_zeros_and_empty_tensors(signed: bool) -> None:
    book = BOOKS[signed]
    for size in (1e-40, 1e-33, 1e-20, 1.0, 1e30):
        expected = numbers(2, 64, signed, seed=7, spread=0.5) * size
        actual = dequantize(*quantize(expected, book), book)
        assert actual.isfinite().all()
        if size > 1e-33:
            assert (actual - expected).abs().max() <= 0.0075 * expected.abs().max()
    nothing = torch.zeros(3, 40)
    for seed in (None, 99):
        assert torch.equal(dequantize(*quantize(nothing, book, seed), book), nothing)
    assert quantize(torch.zeros(0, 40), book)[0].shape == (0, 40)


@pytest.mark.slow
def test_compiled_update_equals_eager_with_unequal_blocks() -> None:
    def moved(gradient: Tensor, codes: Tensor, scales: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        moment = dequantize(codes, scales, BOOKS[True])
        return quantize(moment.lerp_(gradient, 0.5), BOOKS[True], seed)

    gradient, start = (numbers(4, 509, True, seed=seed) for seed in (8, 9))
    actual, expected = (
        f(gradient, *quantize(start, BOOKS[True]), 7) for f in (torch.compile(moved, dynamic=False), moved)
    )
    torch.testing.assert_close(actual[1], expected[1])
    assert (actual[0] == expected[0]).float().mean() > 0.99


@given(columns=some.integers(1, 5000))
def test_blocks_cover_a_row_about_equally(columns: int) -> None:
    count = block_count(columns)
    size = -(-columns // count)
    assert size <= 256 and (count - 1) * size < columns <= count * size
    assert size >= min(columns, 64)
