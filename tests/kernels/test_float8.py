"""FP8 casts compared with a table from their definition, and FP8 products compared with torchao's."""

import logging
import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import round_reference
from torch import Tensor, nn

from thrifty.kernels.float8 import (
    E4M3,
    E5M2,
    Float8Format,
    amax_of,
    cast_float8,
    dequantize_float8,
    scale_from_amax,
    scaled_matmul,
    scaled_matmul_reference,
    update_amax_history,
)
from thrifty.kernels.float8_linear import CastRule, DelayedScaling, float8_linear, next_scales

BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}
"""Exponent bits, mantissa bits and exponent bias (Micikevicius et al. 2022, table 1)."""
ONE = torch.ones(())
formats = pytest.mark.parametrize("format", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def meaning(code: int, name: str) -> float:
    """Return the value of 8 bits by the paper's table: sign, exponent, mantissa."""
    exponent_bits, mantissa_bits, bias = BITS[name]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if name == "e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * 2.0 ** (1 - bias) * mantissa / 2**mantissa_bits
    return sign * 2.0 ** (exponent - bias) * (1 + mantissa / 2**mantissa_bits)


def table(format: Float8Format) -> list[float]:
    return [meaning(code, format.name) for code in range(256)]


def ladder(format: Float8Format) -> list[tuple[float, int]]:
    """Return the non-negative finite values, ascending, with their codes."""
    return [(value, code) for code, value in enumerate(table(format)[:128]) if math.isfinite(value)]


def code_of(number: float, format: Float8Format) -> int:
    """Return the nearest code by lookup, of two equally near ones the even one."""
    steps = ladder(format)
    near = min(steps, key=lambda step: (abs(step[0] - abs(number)), step[1] & 1))
    return near[1] | (0x80 if math.copysign(1.0, number) < 0 else 0)


def codes_of(numbers: Tensor, format: Float8Format, scale: Tensor = ONE) -> list[int]:
    return cast_float8(numbers, scale, format).view(torch.uint8).tolist()


@formats
def test_all_256_codes_have_their_defined_value(format: Float8Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype)
    for actual, expected in zip(dequantize_float8(codes, ONE).tolist(), table(format), strict=True):
        assert (math.isnan(actual) and math.isnan(expected)) or (
            actual == expected and math.copysign(1, actual) == math.copysign(1, expected)
        )
    finite = [value for value in table(format) if math.isfinite(value)]
    assert (max(finite), 2.0**format.least_exponent) == ((448.0, 2.0**-6) if format is E4M3 else (57344.0, 2.0**-14))
    assert max(finite) == format.largest


@formats
def test_every_finite_code_survives_a_round_trip(format: Float8Format) -> None:
    finite = [(code, value) for code, value in enumerate(table(format)) if math.isfinite(value)]
    assert codes_of(torch.tensor([value for _, value in finite]), format) == [code for code, _ in finite]
    halved = torch.tensor([value / 2**20 for _, value in finite])
    assert codes_of(halved, format, torch.tensor(2.0**20)) == [code for code, _ in finite]


@formats
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_is_to_nearest_with_ties_to_even(format: Float8Format, sign: float) -> None:
    steps = ladder(format)
    for (low, below), (high, above) in pairwise(steps):
        middle = sign * (low + high) / 2  # exact in float32
        near = math.nextafter(1.0, 2.0) - 1 + 2.0**-20
        even = below if below % 2 == 0 else above
        bit = 0x80 if sign < 0 else 0
        numbers = torch.tensor([middle, middle * (1 - near), middle * (1 + near)])
        assert codes_of(numbers, format) == [even | bit, below | bit, above | bit]


@formats
@settings(max_examples=60)
@given(numbers=st.lists(st.floats(-(2.0**18), 2.0**18, width=32), min_size=1, max_size=40), power=st.integers(-30, 3))
def test_any_value_gets_the_nearest_code(format: Float8Format, numbers: list[float], power: int) -> None:
    small = torch.tensor(numbers) * 2.0**power
    inside = small.clamp(-format.largest, format.largest)
    assert codes_of(small, format) == [code_of(number, format) for number in inside.tolist()]
    assert torch.equal(cast_float8(small, ONE, format).double(), round_reference(small, format))


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_every_16_bit_value_equals_reference(format: Float8Format, dtype: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    numbers = bits.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    for scale in (ONE, torch.tensor(0.75)):
        actual = cast_float8(numbers, scale, format).double()
        expected = round_reference(numbers.float() * scale, format)
        assert torch.equal(actual.nan_to_num(1e9, 2e9, -2e9), expected.nan_to_num(1e9, 2e9, -2e9))


@formats
def test_finite_values_saturate_at_the_largest(format: Float8Format) -> None:
    numbers = torch.tensor([format.largest * 1.001, format.largest * 2, -3e38, 3e38])
    assert dequantize_float8(cast_float8(numbers, ONE, format), ONE).tolist() == [format.largest] * 2 + [
        -format.largest,
        format.largest,
    ]
    grown = torch.tensor([1e30, -1e30])  # times the scale beyond float32
    assert dequantize_float8(cast_float8(grown, torch.tensor(1e20), format), ONE).tolist() == [
        format.largest,
        -format.largest,
    ]


@formats
def test_non_finite_values_never_become_finite(format: Float8Format) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = torch.tensor([math.inf, -math.inf, math.nan, 1.0], dtype=dtype)
        actual = cast_float8(numbers, ONE, format).float()
        assert not actual[:3].isfinite().any() and actual[3] == 1
        if format is E5M2:
            assert actual[:2].tolist() == [math.inf, -math.inf]
    product = scaled_matmul_reference(
        cast_float8(torch.tensor([[math.inf, 1.0]]), ONE, format),
        ONE,
        cast_float8(torch.ones(2, 1), ONE, format),
        ONE,
        torch.float32,
    )
    assert not product.isfinite().any()


@formats
def test_rounding_equals_ml_dtypes(format: Float8Format) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * format.largest / 8
    kind = ml_dtypes.float8_e4m3fn if format is E4M3 else ml_dtypes.float8_e5m2
    assert codes_of(numbers, format) == numbers.numpy().astype(kind).view("uint8").tolist()


@formats
def test_scale_maps_amax_to_the_largest_value(format: Float8Format) -> None:
    amax = torch.tensor([1.0, 3.0, 1e-20, 1e30])
    scale = scale_from_amax(amax, format)
    torch.testing.assert_close(scale * amax, torch.full((4,), format.largest))
    assert torch.equal(scale_from_amax(amax, format, margin=3) * 8, scale)
    rounded = scale_from_amax(amax, format, powers_of_two=True)
    assert torch.equal(rounded, 2.0 ** scale.double().log2().floor().float())
    assert ((rounded <= scale) & (2 * rounded > scale)).all()


@formats
def test_unusable_amax_keeps_old_scale_and_scales_are_finite(format: Float8Format) -> None:
    amax = torch.tensor([0.0, math.inf, math.nan, 2.0])
    old = torch.tensor([5.0, 6.0, 7.0, 8.0])
    assert scale_from_amax(amax, format, old).tolist() == [5.0, 6.0, 7.0, format.largest / 2]
    assert scale_from_amax(amax, format)[:3].tolist() == [1.0] * 3
    tiny = scale_from_amax(torch.tensor([1e-45, 1e-38]), format)
    assert tiny.isfinite().all() and (tiny == torch.finfo(torch.float32).max).all()
    assert scale_from_amax(torch.tensor(3e38), format, margin=8, powers_of_two=True) > 0


def test_amax_of_tensor_and_of_each_row() -> None:
    numbers = torch.tensor([[1.0, -3.0], [2.0, 0.5]])
    assert amax_of(numbers) == 3 and amax_of(numbers.bfloat16()).dtype == torch.float32
    assert amax_of(numbers, 1).tolist() == [[3.0], [2.0]] and amax_of(numbers, 0).tolist() == [[2.0, 3.0]]
    numbers[0, 0] = math.nan
    assert amax_of(numbers).isnan() and amax_of(numbers, 1)[0].isnan()
    assert amax_of(torch.zeros(0, 3)) == 0 and amax_of(torch.zeros(0, 3), 0).tolist() == [[0.0, 0.0, 0.0]]


def test_amax_history_is_newest_first_and_finite() -> None:
    history = torch.zeros(2, 3)
    for step in range(1, 5):
        history = update_amax_history(history, torch.tensor([float(step), math.inf if step == 3 else 1.0]))
    assert history.tolist() == [[4.0, 3.0, 2.0], [1.0, 0.0, 1.0]]


@settings(max_examples=25)
@given(
    seen=st.lists(st.sampled_from([0.0, 1e-3, 0.5, 7.0, 1e4, math.inf, math.nan]), min_size=1, max_size=25),
    length=st.integers(1, 6),
    margin=st.integers(0, 3),
    most_recent=st.booleans(),
)
def test_delayed_scales_equal_simulated_history(seen: list[float], length: int, margin: int, most_recent: bool) -> None:
    histories, scales, casting = torch.zeros(1, 3, length), torch.zeros(1, 3), CastRule(margin=margin)
    past, simulated = [0.0] * length, [0.0] * 3
    for amax in seen:
        histories, scales = next_scales(histories, scales, torch.full((1, 3), amax), casting, most_recent)
        past = [amax if math.isfinite(amax) else 0.0, *past][:length]
        known = past[0] if most_recent else max(past)
        if known > 0:
            simulated = [largest / known / 2**margin for largest in (448.0, 448.0, 57344.0)]
        torch.testing.assert_close(scales[0].double(), torch.tensor(simulated, dtype=torch.float64), rtol=1e-6, atol=0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner, outer", [(64, 48), (41, 48), (41, 37)])
def test_hardware_products_equal_reference(rows: bool, dtype: torch.dtype, inner: int, outer: int) -> None:
    a, b = normal(20, inner), normal(inner, outer)
    a_scale, b_scale = (
        scale_from_amax(amax_of(x, dim if rows else None), form) for x, dim, form in ((a, 1, E5M2), (b, 0, E4M3))
    )
    factors = cast_float8(a, a_scale, E5M2), a_scale, cast_float8(b, b_scale, E4M3), b_scale, dtype
    actual, expected = scaled_matmul(*factors), scaled_matmul_reference(*factors)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert actual.dtype == dtype and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, **near)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Silence torchao's warnings about missing kernels at import."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "row"])
def test_all_three_products_equal_torchao(quiet: None, rows: bool, powers_of_two: bool, dtype: torch.dtype) -> None:
    torchao = pytest.importorskip("torchao.float8")
    config = pytest.importorskip("torchao.float8.config")
    granularity = config.ScalingGranularity.AXISWISE if rows else config.ScalingGranularity.TENSORWISE
    casts = {
        f"cast_config_{which}": config.CastConfig(scaling_granularity=granularity)
        for which in ("input", "weight", "grad_output")
    }
    ours, theirs = nn.Linear(64, 48, dtype=dtype), nn.Sequential(nn.Linear(64, 48, dtype=dtype))
    theirs[0].load_state_dict(ours.state_dict())
    torchao.convert_to_float8_training(
        theirs, config=torchao.Float8LinearConfig(emulate=True, round_scales_to_power_of_2=powers_of_two, **casts)
    )
    x, gradient = normal(3, 8, 64, dtype=dtype), normal(3, 8, 48, dtype=dtype) * 1e-4
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    casting = CastRule(rows=rows, powers_of_two=powers_of_two)
    actual, expected = float8_linear(mine, ours.weight, ours.bias, casting), theirs(other)
    for result in (actual, expected):
        result.backward(gradient)
    pairs = [
        (actual, expected),
        (mine.grad, other.grad),
        (ours.weight.grad, theirs[0].weight.grad),
        (ours.bias.grad, theirs[0].bias.grad),
    ]
    assert all(torch.equal(here, there) for here, there in pairs)


def test_error_matches_four_mantissa_bits() -> None:
    x, weight = normal(64, 64), normal(48, 64)
    exact = F.linear(x, weight)
    for casting in (CastRule(), CastRule(rows=True), CastRule(powers_of_two=True)):
        error = (float8_linear(x, weight, None, casting) - exact).norm() / exact.norm()
        assert 0.02 < error < 0.05


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "row"])
def test_only_fp8_input_is_saved_and_only_for_trained_weight(rows: bool) -> None:
    x = normal(32, 64).requires_grad_()
    for trained in (True, False):
        weight = nn.Parameter(normal(48, 64), requires_grad=trained)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            float8_linear(x, weight, None, CastRule(rows=rows))
        large = [tensor for tensor in kept if tensor.numel() > 64 and tensor is not weight]
        assert [(tensor.dtype, tensor.shape) for tensor in large] == [(torch.uint8, x.shape)] * trained


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "row"])
@pytest.mark.parametrize("tokens", [32, 13])
def test_layer_on_hardware_equals_emulated_layer(rows: bool, tokens: int) -> None:
    results = []
    for emulated in (True, False):
        x, weight = normal(tokens, 64).requires_grad_(), nn.Parameter(normal(48, 64))
        result = float8_linear(x, weight, None, CastRule(rows=rows, emulated=emulated))
        result.backward(normal(tokens, 48))
        results.append((result.detach(), x.grad, weight.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_delayed_scale_is_used_and_amax_covers_backward_passes() -> None:
    weight, delayed = nn.Parameter(normal(48, 64)), DelayedScaling(torch.zeros(3), torch.zeros(3))
    inputs, gradients = [normal(8, 64), normal(16, 64) * 5], [normal(8, 48), normal(16, 48) / 9]
    for x, gradient in zip(inputs, gradients, strict=True):
        float8_linear(x, weight, None, CastRule(), delayed)  # without a backward pass nothing is recorded
        float8_linear(x, weight, None, CastRule(), delayed).backward(gradient)
    largest = [max(float(each.detach().abs().max()) for each in group) for group in (inputs, [weight], gradients)]
    assert delayed.seen.tolist() == largest
    assert not delayed.scales.any()
    x = inputs[0]
    current = float8_linear(x, weight, None, CastRule())
    assert torch.equal(float8_linear(x, weight, None, CastRule(), delayed), current)
    delayed.scales.copy_(torch.tensor([2.0, 0.0, 0.0]))  # too small to keep most digits of the input
    reference = round_reference(x * 2, E4M3).float() / 2
    weight_scale = scale_from_amax(amax_of(weight.detach()), E4M3)
    expected = reference @ dequantize_float8(cast_float8(weight.detach(), weight_scale, E4M3), weight_scale).T
    torch.testing.assert_close(float8_linear(x, weight, None, CastRule(), delayed), expected)


def test_autocast_dtype_equals_linear_layer() -> None:
    x, linear = normal(2, 8, 64).requires_grad_(), nn.Linear(64, 48)
    with torch.autocast("cpu", torch.bfloat16):
        actual = float8_linear(x, linear.weight, linear.bias, CastRule())
        assert actual.dtype == linear(x).dtype == torch.bfloat16
    actual.backward(torch.ones_like(actual))
    assert x.grad is not None and linear.weight.grad is not None
    assert x.grad.dtype == linear.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):  # the sum inside does not lose digits either
        again = float8_linear(x.float(), linear.weight, None, CastRule()).float()
    expected = float8_linear(x, linear.weight, None, CastRule())
    assert (again - expected).abs().max() <= expected.abs().max() * 2.0**-8


@pytest.mark.slow
def test_compiled_layer_is_bit_identical() -> None:
    weight, casting = nn.Parameter(normal(48, 64)), CastRule()
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        delayed, x = DelayedScaling(torch.full((3,), 40.0), torch.zeros(3)), normal(16, 64).requires_grad_()

        def layer(x: Tensor, delayed: DelayedScaling = delayed) -> Tensor:
            return float8_linear(x, weight, None, casting, delayed).relu()

        weight.grad = None
        function = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        result = function(x)
        result.square().sum().backward()
        results.append((result, x.grad, weight.grad, delayed.seen))
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*results, strict=True))


def test_second_derivative_is_refused() -> None:
    x = normal(16, 64).requires_grad_()
    result = float8_linear(x, nn.Parameter(normal(48, 64)), None, CastRule()).square().sum()
    (first,) = torch.autograd.grad(result, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_e4m3_underflows_gradients_that_e5m2_keeps() -> None:
    """Gradients spread over more powers of two than 4 exponent bits reach."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-24, 1, (256, 48), generator=generator).float())
    gradient = torch.randn(256, 48, generator=generator) * spread
    lost = {}
    for format in (E4M3, E5M2):
        scale = scale_from_amax(amax_of(gradient), format)
        lost[format.name] = float((dequantize_float8(cast_float8(gradient, scale, format), scale) == 0).float().mean())
    assert lost["e4m3"] > 0.25 > 0.02 > lost["e5m2"]
