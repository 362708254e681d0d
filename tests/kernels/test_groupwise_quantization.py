"""Codes of 2, 4 and 8 bits: what they stand for on average, how far they stray, and that fast is plain bit for bit."""

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
DRAWS = 2000


def drawn(*shape: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean


@pytest.fixture
def compiled_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many draws of small tensors; without a compiler they take their time."""
    monkeypatch.setattr(quantized_tensors, "COMPILED_FROM", 1)


def moments(
    tensor: Tensor, bits: int, zeros: bool = False, ranges: QuantizationRanges | None = None
) -> tuple[Tensor, Tensor]:
    """Mean error and mean squared error of each number over seeds, in float64."""
    total, squares = torch.zeros(2, *tensor.shape, dtype=torch.float64)
    for seed in range(DRAWS):
        coded = quantize_tensor(tensor, bits, seed, ranges, zeros)
        assert coded is not None
        error = coded.decode().double() - tensor.double()
        total += error
        squares += error.square()
    return total / DRAWS, squares / DRAWS


def steps_of(tensor: Tensor, bits: int, zeros: bool = False) -> Tensor:
    """The step of the group that each number is in."""
    coded = quantize_tensor(tensor, bits, 0, None, zeros)
    assert coded is not None
    return coded.step.double().repeat_interleave(coded.ranges.width)[: tensor.numel()].view(tensor.shape)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("mean", [0.0, 10.0])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_comes_back_has_what_went_in_as_its_expectation(bits: int, mean: float) -> None:
    """Including least numbers and steps as they are stored: published code is off by 0.01 here."""
    tensor = drawn(16, 256, mean=mean)
    error, square = moments(tensor, bits)
    within = 3 * (square / DRAWS).sqrt() + 1e-6 * (1 + mean)
    assert (error.abs() <= within).double().mean() > 0.99  # three sigma leave out 3 in 1000
    spread = (square.mean() / DRAWS / tensor.numel()).sqrt()
    assert abs(error.mean()) < 4 * spread


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 8])
def test_so_it_has_in_formats_that_cannot_hold_what_codes_stand_for(bits: int, dtype: torch.dtype) -> None:
    tensor = drawn(8, 256, mean=10.0).to(dtype)
    error, square = moments(tensor, bits)
    assert (error.abs() <= 3 * (square / DRAWS).sqrt() + 1e-5).double().mean() > 0.99


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("compiled_always")
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_variance_is_below_its_bound(bits: int, zeros: bool) -> None:
    tensor = drawn(16, 256).relu() if zeros else drawn(16, 256)
    _, square = moments(tensor, bits, zeros)
    step = steps_of(tensor, bits, zeros)
    assert (square <= step.square() / 4 * 1.02).all()  # of 2000 draws the mean square itself is 1 % uncertain
    if not zeros:  # ranges are rounded outwards to 8 bits of mantissa
        exact = (tensor.amax(1) - tensor.amin(1)) / (2**bits - 1)
        assert (step[:, 0] >= exact - 1e-7).all() and (step[:, 0] <= 1.04 * exact).all()


@pytest.mark.usefixtures("compiled_always")
def test_zeros_stay_zeros_and_of_numbers_that_are_not_negative_no_other_becomes_one() -> None:
    tensor = drawn(64, 256).relu()
    tensor[7] = 0.0
    for bits in (2, 4, 8):
        for seed in range(50):
            coded = quantize_tensor(tensor, bits, seed, zeros=True)
            assert coded is not None and torch.equal(coded.decode() == 0, tensor == 0)
    error, square = moments(tensor[:8], 4, zeros=True)
    assert (error.abs() <= 3 * (square / DRAWS).sqrt() + 1e-6).double().mean() > 0.99


@given(seed=some.integers(0, 2**32 - 1))
def test_a_seed_is_mixed_as_all_words_are(seed: int) -> None:
    assert torch.equal(seed_word(seed, CPU), mix_bits_torch(torch.tensor(seed).to(torch.int32)))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_outside_a_range_gets_its_first_or_last_code(bits: int) -> None:
    """A published kernel wraps around: 1.5 in a range of -1 … 1 came back as -0.5."""
    lines = torch.linspace(-3, 3, 64)[None]
    ends = [torch.full((1, 1), end) for end in (-1.0, 1.0)]
    least, step = round_outward(*ends, bits, False)
    words = seed_word(0, CPU), words_of_places(64, CPU), 0
    packed = quantize_lines(lines, least, step, *words, bits, False)
    found = unpack_lines(packed, least, step, *words, bits, False, torch.float32)
    low, high = least.item(), (least + step * (2**bits - 1)).item()
    assert (found[lines <= -1] == low).all() and torch.allclose(found[lines >= 1.02], torch.tensor(high))
    assert found.min() >= low and found.max() <= high + 1e-6


@settings(max_examples=60)
@given(
    bits=some.sampled_from([2, 4, 8]), lines=some.integers(1, 5), width=some.sampled_from([8, 24, 64, 256]),
    seed=some.integers(0, 2**32 - 1), zeros=some.booleans(),
)  # fmt: skip
def test_every_code_survives_packing(bits: int, lines: int, width: int, seed: int, zeros: bool) -> None:
    """Numbers that are codes already, in a range of step one, come back as they are."""
    top = 2**bits - 1
    codes = torch.randint(0, top + 1, (lines, width), generator=torch.Generator().manual_seed(seed % 2**31))
    codes[0, : min(top + 1, width)] = torch.arange(top + 1)[:width]
    words = seed_word(seed, CPU), words_of_places(width, CPU), 0
    least, step = torch.full((lines, 1), float(zeros)), torch.ones(lines, 1)
    packed = quantize_lines(codes.float(), least, step, *words, bits, zeros)
    assert packed.dtype == torch.uint8 and packed.shape == (lines, width * bits // 8)
    found = unpack_lines(packed, least, step, *words, bits, zeros, torch.float32)
    assert torch.equal(found, codes.float())


@settings(max_examples=80)
@given(
    shape=some.lists(some.integers(1, 15), min_size=1, max_size=4), bits=some.sampled_from([2, 4, 8]),
    group=some.sampled_from([8, 64, 256]), zeros=some.booleans(), reverse=some.booleans(),
)  # fmt: skip
def test_any_shape_comes_back_within_a_step_of_its_group(
    shape: list[int], bits: int, group: int, zeros: bool, reverse: bool
) -> None:
    tensor = drawn(*shape, seed=bits)
    tensor = tensor.relu() if zeros else tensor
    tensor = tensor.permute(*reversed(range(len(shape)))) if reverse else tensor
    coded = quantize_tensor(tensor, bits, 3, by_group(tensor.numel(), group), zeros)
    assert coded is not None
    found = coded.decode()
    assert found.shape == tensor.shape and found.stride() == tensor.stride()
    largest = (tensor.max() - tensor.min()).clamp(min=1e-6) / (2**bits - 1 - zeros)
    assert (found - tensor).abs().max() <= 1.05 * largest + 0.01 * tensor.abs().max()


def test_what_a_last_line_is_filled_up_with_does_not_widen_its_range() -> None:
    tensor = drawn(300, mean=100.0)
    coded = quantize_tensor(tensor, 4, 0)
    assert coded is not None
    assert coded.step[1] < 1.1 * (tensor[256:].max() - tensor[256:].min()) / 15 + 0.5 / 15


@pytest.mark.usefixtures("compiled_always")
def test_a_constant_is_exact_where_bfloat16_has_it_and_else_right_on_average() -> None:
    coded = quantize_tensor(torch.full((512,), 2.5), 2, 0)
    assert coded is not None and (coded.decode() == 2.5).all()
    error, square = moments(torch.full((256,), math.pi), 4)
    assert abs(error.mean()) < 4 * (square.mean() / DRAWS / 256).sqrt() + 1e-6


def test_a_seed_decides_and_neighbours_do_not_share_their_luck() -> None:
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
def test_a_range_for_each_head_and_for_each_few_channels() -> None:
    """One loud head, or channel, must not cost the others their precision."""
    heads = drawn(3, 4, 16, 32)
    heads[:, 2] *= 100
    for layout in (heads, heads.transpose(1, 2).contiguous().transpose(1, 2)):
        ranges = by_head(layout.shape, layout.stride(), 256)
        assert ranges is not None and ranges.count == 4
        coded = quantize_tensor(layout, 4, 0, ranges)
        assert coded is not None and coded.step.shape == (4,)
        wanted = (layout.amax((0, 2, 3)) - layout.amin((0, 2, 3))) / 15
        assert torch.allclose(coded.step.float(), wanted, rtol=0.02)
        assert ((coded.decode() - layout).abs().amax((0, 2, 3)) <= 1.02 * wanted).all()
    channels = heads.transpose(1, 2).flatten(2)
    ranges = by_head(channels.shape, channels.stride(), 32)
    assert ranges is not None and (ranges.count, ranges.inner) == (4, 32)
    error, square = moments(channels[:, :2].contiguous(), 4, ranges=by_head((3, 2, 128), (256, 128, 1), 32))
    assert (error.abs() <= 3 * (square / DRAWS).sqrt() + 1e-5).double().mean() > 0.99
    assert by_head((5, 7), (7, 1), 256) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min])
def test_what_codes_cannot_stand_for_is_refused(bad: float) -> None:
    tensor = drawn(4, 256)
    tensor[1, 3] = bad
    for zeros in (False, True):
        assert quantize_tensor(tensor, 4, 0, zeros=zeros) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_two_values_take_a_bit_each_and_are_exact(dtype: torch.dtype) -> None:
    mask = torch.rand(37, 41) < 0.7
    low, high = (0.0, 1.0) if dtype == torch.bool else (-math.inf, 1 / 0.9)
    values = torch.where(mask, torch.tensor(high).to(dtype), torch.tensor(low).to(dtype)).t()
    coded = pack_mask(values, (low, values.double().max().item()))
    assert torch.equal(coded.decode(), values) and coded.decode().stride() == values.stride()
    assert coded.codes.numel() == -(-37 * 41 // 256) * 32


def test_codes_take_their_bits_and_an_eighth() -> None:
    coded = quantize_tensor(drawn(128, 256), 4, 0)
    assert coded is not None
    held = sum(part.numel() * part.element_size() for part in (coded.codes, coded.least, coded.step))
    assert held * 8 == (4 + 1 / 8) * 128 * 256


@pytest.fixture
def compiled_from_8_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpp_compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(quantized_tensors, "COMPILED_FROM", 8 * 256)


def uneven(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many sizes, either zero, and lines of nothing but zeros or one number."""
    tensor = drawn(*shape) * 10.0 ** drawn(*shape[:-1], 1, seed=1)
    tensor[..., ::5], tensor[..., 1::7] = 0.0, -0.0
    tensor[0], tensor[1], tensor[2] = 0.0, -1.7, tensor[2].abs()
    return tensor.to(dtype)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("heads", [None, 64, 128], ids=["groups", "heads", "a head"])
@pytest.mark.parametrize("zeros", [False, True], ids=["any", "zeros"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_is_plain_bit_for_bit(dtype: torch.dtype, bits: int, zeros: bool, heads: int | None) -> None:
    for shape in ((30, 256), (7, 11, 128)):
        tensor = uneven(shape, dtype)
        ranges = by_head(tensor.shape, tensor.stride(), heads) if heads else by_group(tensor.numel())
        compiled = quantize_tensor(tensor, bits, 9, ranges, zeros)
        assert compiled is not None
        given = compiled.decode()
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
                assert torch.equal(plain.decode(), given)


@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_refuses_what_plain_code_does(dtype: torch.dtype, bad: float) -> None:
    tensor = drawn(16, 256).to(dtype)
    tensor[3, 5] = bad
    heads = QuantizationRanges(2, 4, 512, 256)
    assert all(
        quantize_tensor(tensor, 4, 0, ranges, zeros) is None for ranges in (None, heads) for zeros in (False, True)
    )


@pytest.mark.usefixtures("compiled_from_8_lines")
def test_threads_share_the_lines_of_a_large_tensor_and_change_nothing() -> None:
    tensor, threads = drawn(3 * compiled_quantization.FEWEST // 256 + 5, 256), torch.get_num_threads()
    found = []
    try:
        for some in (1, 3):
            torch.set_num_threads(some)
            found.append(quantize_tensor(tensor, 4, 0))
    finally:
        torch.set_num_threads(threads)
    alone, shared = found
    assert alone is not None and shared is not None
    assert torch.equal(alone.codes, shared.codes) and torch.equal(alone.step, shared.step)


@pytest.mark.usefixtures("compiled_from_8_lines")
@pytest.mark.parametrize("values", [(0.0, 1.25), (-math.inf, 0.0), (-0.0, 1.0), (-2.0, -0.0)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_a_compiled_mask_is_the_plain_one(dtype: torch.dtype, values: tuple[float, float]) -> None:
    mask = drawn(100, 77) < 0.3
    values = (0.0, 1.0) if dtype == torch.bool else values
    low, high = (torch.tensor(value).to(dtype) for value in values)
    tensor = torch.where(mask, high, low)
    if dtype != torch.bool:
        tensor[::3] = torch.where(tensor[::3] == 0, -tensor[::3], tensor[::3])  # either zero is a zero
    compiled = pack_mask(tensor, values)
    given = compiled.decode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_tensors, "COMPILED_FROM", 2**60)
        plain = pack_mask(tensor, values)
        assert torch.equal(plain.codes, compiled.codes) and torch.equal(plain.decode(), given)
    assert torch.equal(given, tensor)


def test_lines_by_themselves_are_a_kernel_for_anybodys_loop() -> None:
    lines = drawn(5, 64)
    words = seed_word(1, CPU), words_of_places(64, CPU), 0
    packed, least, step = pack_lines(lines, *words, 8, False)
    found = unpack_lines(packed, least, step, *words, 8, False, torch.float32)
    assert ((found - lines).abs() <= step.float()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("under", [torch.float16, torch.bfloat16])
def test_codes_are_the_same_under_autocast(dtype: torch.dtype, under: torch.dtype) -> None:
    for zeros in (False, True):
        numbers = drawn(3, 257).to(dtype)
        plain, mask = quantize_tensor(numbers, 4, 0, zeros=zeros), pack_mask((numbers > 0).to(dtype))
        with torch.autocast("cpu", under):
            coded, packed = quantize_tensor(numbers, 4, 0, zeros=zeros), pack_mask((numbers > 0).to(dtype))
            assert plain is not None and coded is not None
            assert torch.equal(coded.decode(), plain.decode()) and torch.equal(packed.decode(), mask.decode())


def test_each_number_of_bits_is_compiled_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
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
        for found, wanted in zip(
            compiled(lines, *words, 0, bits, False), pack_lines(lines, *words, 0, bits, False), strict=True
        ):
            assert torch.equal(found, wanted)
    assert len(seen) >= 3 and all(isinstance(each, Tensor) for inputs in seen for each in inputs)
