"""Quantization to 2, 4 and 8 bits: bias, error bounds, and equality of fast and plain code bit for bit."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels import compiled_quantization, quantized_tensors
from thrifty.kernels.groupwise_quantization import (
    mix_bits_torch,
    pack_lines,
    quantize_lines,
    round_outward,
    seed_word,
    unpack_lines,
    words_of_places,
)
from thrifty.kernels.quantization_ranges import QuantizationRanges, by_group, by_head
from thrifty.kernels.quantized_tensors import pack_mask, quantize_tensor
from thrifty.machine.cpu_features import cpp_compiler

CPU = torch.device("cpu")
SAMPLES = 2000


def normal(*shape: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean


@pytest.fixture
def compiled_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use compiled code even for small tensors; without a compiler the tests are slow."""
    monkeypatch.setattr(quantized_tensors, "COMPILED_FROM", 1)


def moments(
    tensor: Tensor, bits: int, zeros: bool = False, ranges: QuantizationRanges | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean error and mean squared error of each element over seeds, in float64."""
    total, squares = torch.zeros(2, *tensor.shape, dtype=torch.float64)
    for seed in range(SAMPLES):
        quantized = quantize_tensor(tensor, bits, seed, ranges, zeros)
        assert quantized is not None
        error = quantized.decode().double() - tensor.double()
        total += error
        squares += error.square()
    return total / SAMPLES, squares / SAMPLES


def steps_of(tensor: Tensor, bits: int, zeros: bool = False) -> Tensor:
    """Return the step of the group of each element."""
    quantized = quantize_tensor(tensor, bits, 0, None, zeros)
    assert quantized is not None
    return quantized.step.double().repeat_interleave(quantized.ranges.width)[: tensor.numel()].view(tensor.shape)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantization_is_unbiased(bits: int, mean: float) -> None:
    """Includes the stored minimums and steps, where published code has an error of 0.01."""
    tensor = normal(16, 256, mean=mean)
    error, square = moments(tensor, bits)
    within = 3 * (square / SAMPLES).sqrt() + 1e-6 * (1 + mean)
    assert (error.abs() <= within).double().mean() > 0.99  # three sigma leave out 3 in 1000
    spread = (square.mean() / SAMPLES / tensor.numel()).sqrt()
    assert abs(error.mean()) < 4 * spread


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 8])
def test_quantization_is_unbiased_in_16_bit_dtypes(bits: int, dtype: torch.dtype) -> None:
    tensor = normal(8, 256, mean=10.0).to(dtype)
    error, square = moments(tensor, bits)
    assert (error.abs() <= 3 * (square / SAMPLES).sqrt() + 1e-5).double().mean() > 0.99


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_variance_is_below_its_bound(bits: int, zeros: bool) -> None:
    tensor = normal(16, 256).relu() if zeros else normal(16, 256)
    _, square = moments(tensor, bits, zeros)
    step = steps_of(tensor, bits, zeros)
    assert (square <= step.square() / 4 * 1.02).all()  # with 2000 samples the mean square is uncertain by 1 %
    if not zeros:  # ranges are rounded outward to 8 mantissa bits
        exact = (tensor.amax(1) - tensor.amin(1)) / (2**bits - 1)
        assert (step[:, 0] >= exact - 1e-7).all() and (step[:, 0] <= 1.04 * exact).all()


@pytest.mark.usefixtures("compiled_always")
def test_zeros_stay_zeros_and_positive_values_stay_positive() -> None:
    tensor = normal(64, 256).relu()
    tensor[7] = 0.0
    for bits in (2, 4, 8):
        for seed in range(50):
            quantized = quantize_tensor(tensor, bits, seed, zeros=True)
            assert quantized is not None and torch.equal(quantized.decode() == 0, tensor == 0)
    error, square = moments(tensor[:8], 4, zeros=True)
    assert (error.abs() <= 3 * (square / SAMPLES).sqrt() + 1e-6).double().mean() > 0.99


@given(seed=some.integers(0, 2**32 - 1))
def test_seed_word_equals_mixed_bits(seed: int) -> None:
    assert torch.equal(seed_word(seed, CPU), mix_bits_torch(torch.tensor(seed).to(torch.int32)))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_outside_a_range_get_the_first_or_last_code(bits: int) -> None:
    """A published kernel wraps around: 1.5 in a range of -1 … 1 becomes -0.5."""
    lines = torch.linspace(-3, 3, 64)[None]
    ends = [torch.full((1, 1), end) for end in (-1.0, 1.0)]
    least, step = round_outward(*ends, bits, False)
    words = seed_word(0, CPU), words_of_places(64, CPU), 0
    packed = quantize_lines(lines, least, step, *words, bits, False)
    actual = unpack_lines(packed, least, step, *words, bits, False, torch.float32)
    low, high = least.item(), (least + step * (2**bits - 1)).item()
    assert (actual[lines <= -1] == low).all() and torch.allclose(actual[lines >= 1.02], torch.tensor(high))
    assert actual.min() >= low and actual.max() <= high + 1e-6


@settings(max_examples=60)
@given(
    bits=some.sampled_from([2, 4, 8]), lines=some.integers(1, 5), width=some.sampled_from([8, 24, 64, 256]),
    seed=some.integers(0, 2**32 - 1), zeros=some.booleans(),
)  # fmt: skip
def test_every_code_survives_packing(bits: int, lines: int, width: int, seed: int, zeros: bool) -> None:
    """Integers in a range of step one return unchanged."""
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (lines, width), generator=torch.Generator().manual_seed(seed % 2**31))
    codes[0, : min(top + 1, width)] = torch.arange(top + 1)[:width]
    words = seed_word(seed, CPU), words_of_places(width, CPU), 0
    least, step = torch.full((lines, 1), float(zeros)), torch.ones(lines, 1)
    packed = quantize_lines(codes.float(), least, step, *words, bits, zeros)
    assert packed.dtype == torch.uint8 and packed.shape == (lines, width * bits // 8)
    actual = unpack_lines(packed, least, step, *words, bits, zeros, torch.float32)
    assert torch.equal(actual, codes.float())


@settings(max_examples=80)
@given(
    shape=some.lists(some.integers(1, 15), min_size=1, max_size=4), bits=some.sampled_from([2, 4, 8]),
    group=some.sampled_from([8, 64, 256]), zeros=some.booleans(), reverse=some.booleans(),
)  # fmt: skip
def test_error_of_any_shape_is_below_a_step(
    shape: list[int], bits: int, group: int, zeros: bool, reverse: bool
) -> None:
    tensor = normal(*shape, seed=bits)
    tensor = tensor.relu() if zeros else tensor
    tensor = tensor.permute(*reversed(range(len(shape)))) if reverse else tensor
    quantized = quantize_tensor(tensor, bits, 3, by_group(tensor.numel(), group), zeros)
    assert quantized is not None
    actual = quantized.decode()
    assert actual.shape == tensor.shape and actual.stride() == tensor.stride()
    largest = (tensor.max() - tensor.min()).clamp(min=1e-6) / (2**bits - 1 - zeros)
    assert (actual - tensor).abs().max() <= 1.05 * largest + 0.01 * tensor.abs().max()


def test_padding_of_the_last_line_does_not_widen_its_range() -> None:
    tensor = normal(300, mean=100.0)
    quantized = quantize_tensor(tensor, 4, 0)
    assert quantized is not None
    assert quantized.step[1] < 1.1 * (tensor[256:].max() - tensor[256:].min()) / 15 + 0.5 / 15


@pytest.mark.usefixtures("compiled_always")
def test_constant_is_exact_in_bfloat16_or_unbiased() -> None:
    quantized = quantize_tensor(torch.full((512,), 2.5), 2, 0)
    assert quantized is not None and (quantized.decode() == 2.5).all()
    error, square = moments(torch.full((256,), math.pi), 4)
    assert abs(error.mean()) < 4 * (square.mean() / SAMPLES / 256).sqrt() + 1e-6


def test_rounding_depends_on_seed_and_neighbors_are_independent() -> None:
    tensor = torch.full((64, 256), 0.5)
    tensor[:, 0], tensor[:, 1] = 0.0, 15.0
    first, again, other = (quantize_tensor(tensor, 4, seed) for seed in (1, 1, 2))
    assert first and again and other
    assert torch.equal(first.codes, again.codes) and not torch.equal(first.codes, other.codes)
    up = (first.decode()[:, 2:] > 0.5).double()
    assert abs(up.mean() - 0.5) < 0.02
    for shifted in (up.roll(1, 1), up.roll(1, 0), up.roll(128, 1), up.roll(7, 1)):
        assert abs(((up - 0.5) * (shifted - 0.5)).mean()) < 0.01


@pytest.mark.usefixtures("compiled_always")
def test_ranges_by_head_and_by_channel_group() -> None:
    """One head, or channel, with large values must not cost the others their precision."""
    heads = normal(3, 4, 16, 32)
    heads[:, 2] *= 100
    for layout in (heads, heads.transpose(1, 2).contiguous().transpose(1, 2)):
        ranges = by_head(layout.shape, layout.stride(), 256)
        assert ranges is not None and ranges.count == 4
        quantized = quantize_tensor(layout, 4, 0, ranges)
        assert quantized is not None and quantized.step.shape == (4,)
        expected = (layout.amax((0, 2, 3)) - layout.amin((0, 2, 3))) / 15
        assert torch.allclose(quantized.step.float(), expected, rtol=0.02)
        assert ((quantized.decode() - layout).abs().amax((0, 2, 3)) <= 1.02 * expected).all()
    channels = heads.transpose(1, 2).flatten(2)
    ranges = by_head(channels.shape, channels.stride(), 32)
    assert ranges is not None and (ranges.count, ranges.inner) == (4, 32)
    error, square = moments(channels[:, :2].contiguous(), 4, ranges=by_head((3, 2, 128), (256, 128, 1), 32))
    assert (error.abs() <= 3 * (square / SAMPLES).sqrt() + 1e-5).double().mean() > 0.99
    assert by_head((5, 7), (7, 1), 256) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min])
def test_values_that_cannot_be_quantized_return_none(bad: float) -> None:
    tensor = normal(4, 256)
    tensor[1, 3] = bad
    for zeros in (False, True):
        assert quantize_tensor(tensor, 4, 0, zeros=zeros) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_packed_mask_is_exact_with_one_bit_per_element(dtype: torch.dtype) -> None:
    mask = torch.rand(37, 41) < 0.7
    low, high = (0.0, 1.0) if dtype == torch.bool else (-math.inf, 1 / 0.9)
    values = torch.where(mask, torch.tensor(high).to(dtype), torch.tensor(low).to(dtype)).t()
    quantized = pack_mask(values, (low, values.double().max().item()))
    assert torch.equal(quantized.decode(), values) and quantized.decode().stride() == values.stride()
    assert quantized.codes.numel() == -(-37 * 41 // 256) * 32


def test_4_bit_storage_has_one_eighth_bit_of_metadata() -> None:
    quantized = quantize_tensor(normal(128, 256), 4, 0)
    assert quantized is not None
    stored = sum(part.numel() * part.element_size() for part in (quantized.codes, quantized.least, quantized.step))
    assert stored * 8 == (4 + 1 / 8) * 128 * 256


@pytest.fixture
def compiled_from_8_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(quantized_tensors, "COMPILED_FROM", 8 * 256)


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values of many magnitudes, both zeros, and lines of only zeros or one value."""
    tensor = normal(*shape) * 10.0 ** normal(*shape[:-1], 1, seed=1)
    tensor[..., ::5], tensor[..., 1::7] = 0.0, -0.0
    tensor[0], tensor[1], tensor[2] = 0.0, -1.7, tensor[2].abs()
    return tensor.to(dtype)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("heads", [None, 64, 128], ids=["groups", "heads", "a head"])
@pytest.mark.parametrize("zeros", [False, True], ids=["any", "zeros"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_quantization_is_bit_identical_to_plain(
    dtype: torch.dtype, bits: int, zeros: bool, heads: int | None
) -> None:
    for shape in ((30, 256), (7, 11, 128)):
        tensor = uneven(shape, dtype)
        ranges = by_head(tensor.shape, tensor.stride(), heads) if heads else by_group(tensor.numel())
        compiled = quantize_tensor(tensor, bits, 9, ranges, zeros)
        assert compiled is not None
        decoded = compiled.decode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized_tensors, "COMPILED_FROM", 2**60)
            for size in (10 * 256, 2**18):  # in pieces, and at once
                patch.setattr(quantized_tensors, "CHUNK_ELEMENTS", size)
                plain = quantize_tensor(tensor, bits, 9, ranges, zeros)
                assert plain is not None
                for mine, theirs in zip(
                    (plain.codes, plain.least, plain.step), (compiled.codes, compiled.least, compiled.step), strict=True
                ):
                    assert torch.equal(mine, theirs)
                assert torch.equal(plain.decode(), decoded)


@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_refuses_non_finite_values_too(dtype: torch.dtype, bad: float) -> None:
    tensor = normal(16, 256).to(dtype)
    tensor[3, 5] = bad
    heads = QuantizationRanges(2, 4, 512, 256)
    assert all(
        quantize_tensor(tensor, 4, 0, ranges, zeros) is None for ranges in (None, heads) for zeros in (False, True)
    )


@pytest.mark.usefixtures("compiled_from_8_lines")
def test_result_is_independent_of_thread_count() -> None:
    tensor, threads = normal(3 * compiled_quantization.FEWEST // 256 + 5, 256), torch.get_num_threads()
    actual = []
    try:
        for some in (1, 3):
            torch.set_num_threads(some)
            actual.append(quantize_tensor(tensor, 4, 0))
    finally:
        torch.set_num_threads(threads)
    alone, shared = actual
    assert alone is not None and shared is not None
    assert torch.equal(alone.codes, shared.codes) and torch.equal(alone.step, shared.step)


@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("values", [(0.0, 1.25), (-math.inf, 0.0), (-0.0, 1.0), (-2.0, -0.0)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_compiled_mask_is_bit_identical_to_plain(dtype: torch.dtype, values: tuple[float, float]) -> None:
    mask = normal(100, 77) < 0.3
    values = (0.0, 1.0) if dtype == torch.bool else values
    low, high = (torch.tensor(value).to(dtype) for value in values)
    tensor = torch.where(mask, high, low)
    if dtype != torch.bool:
        tensor[::3] = torch.where(tensor[::3] == 0, -tensor[::3], tensor[::3])  # both signs of zero
    compiled = pack_mask(tensor, values)
    decoded = compiled.decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_tensors, "COMPILED_FROM", 2**60)
        plain = pack_mask(tensor, values)
        assert torch.equal(plain.codes, compiled.codes) and torch.equal(plain.decode(), decoded)
    assert torch.equal(decoded, tensor)


def test_lines_can_be_packed_and_unpacked_directly() -> None:
    lines = normal(5, 64)
    words = seed_word(1, CPU), words_of_places(64, CPU), 0
    packed, least, step = pack_lines(lines, *words, 8, False)
    actual = unpack_lines(packed, least, step, *words, 8, False, torch.float32)
    assert ((actual - lines).abs() <= step.float()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("under", [torch.float16, torch.bfloat16])
def test_quantization_is_unchanged_under_autocast(dtype: torch.dtype, under: torch.dtype) -> None:
    for zeros in (False, True):
        numbers = normal(3, 257).to(dtype)
        plain, mask = quantize_tensor(numbers, 4, 0, zeros=zeros), pack_mask((numbers > 0).to(dtype))
        with torch.autocast("cpu", under):
            quantized, packed = quantize_tensor(numbers, 4, 0, zeros=zeros), pack_mask((numbers > 0).to(dtype))
            assert plain is not None and quantized is not None
            assert torch.equal(quantized.decode(), plain.decode()) and torch.equal(packed.decode(), mask.decode())


def test_bits_are_compiled_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[object]] = []

    def look(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        seen.append(inputs)
        return graph.forward

    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_function(function, backend=look))
    words = (
        quantized_tensors.seed_word(3, torch.device("cpu")),
        quantized_tensors.words_of_places(64, torch.device("cpu")),
    )
    lines = torch.randn(5, 64)
    for bits in (2, 4, 8):
        compiled = quantized_tensors._compiled(pack_lines, ("a test", bits))
        for actual, expected in zip(
            compiled(lines, *words, 0, bits, False), pack_lines(lines, *words, 0, bits, False), strict=True
        ):
            assert torch.equal(actual, expected)
    assert len(seen) >= 3 and all(isinstance(each, Tensor) for inputs in seen for each in inputs)
