"""Codes made by a GPU: those of the processor but for roundings; products of 8-bit floats: those that are emulated."""

import pytest
import torch
from gpu_only import GPU, on_a_gpu
from torch import Tensor

from thrifty.kernels.float8 import (
    E4M3,
    E5M2,
    Float8Format,
    amax_of,
    cast_float8,
    has_units,
    scale_from_amax,
    scaled_matmul,
    scaled_matmul_reference,
)
from thrifty.kernels.float8_linear import CastRule, float8_linear
from thrifty.kernels.quantized_tensors import COMPILED_FROM, pack_mask, quantize_tensor

pytestmark = on_a_gpu
FORMATS = [E4M3, E5M2]
DRAWS = 64
SIZES = [(1000, torch.float32), (1000, torch.bfloat16), (1000, torch.float16), (4 * COMPILED_FROM + 3, torch.bfloat16)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size, dtype", SIZES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_stand_for_the_numbers_on_average_and_are_those_of_a_processor_but_for_roundings(
    size: int, bits: int, zeros: bool, dtype: torch.dtype
) -> None:
    """Which may make a step another by its last bit, and so codes at the brink of another, in a group."""
    tensor = drawn(size, dtype=dtype)
    tensor[::7] = 0
    on_gpu = tensor.to(GPU)
    total = torch.zeros(size, dtype=torch.float64, device=GPU)
    for seed in range(DRAWS):
        coded = quantize_tensor(on_gpu, bits, seed, None, zeros)
        assert coded is not None
        back = coded.decode()
        total += back.double() - on_gpu.double()
    steps = coded.step.double().repeat_interleave(coded.ranges.width)[:size]
    assert bool(((back.double() - on_gpu.double()).abs() <= 1.01 * steps + 1e-2 * on_gpu.double().abs()).all())
    assert not zeros or not bool(back[on_gpu == 0].any())
    assert abs(float((total / DRAWS / steps).mean())) < 4 * 0.5 / (DRAWS * size) ** 0.5 + 1e-3
    here, there = quantize_tensor(tensor, bits, 5, None, zeros), quantize_tensor(on_gpu, bits, 5, None, zeros)
    assert here is not None and there is not None
    assert (here.codes == there.codes.cpu()).double().mean() > 0.9


def test_masks_come_back_from_bits_exactly() -> None:
    mask = drawn(3, 70_001).to(GPU) > 0.3
    assert torch.equal(pack_mask(mask).decode(), mask)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_16_bit_number_gets_the_code_that_the_processor_gives_it(
    format: Float8Format, dtype: torch.dtype
) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    numbers = bits.view(torch.bfloat16 if dtype == torch.bfloat16 else torch.float16).to(dtype)
    for scale in (torch.ones(()), torch.tensor(0.75), torch.tensor(2.0**12)):
        here, there = cast_float8(numbers, scale, format), cast_float8(numbers.to(GPU), scale.to(GPU), format).cpu()
        lost = here.float().isnan()
        assert torch.equal(there.float().isnan(), lost)
        assert torch.equal(there.view(torch.uint8)[~lost], here.view(torch.uint8)[~lost])


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
@pytest.mark.parametrize("left", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", [(64, 128, 32), (50, 72, 41), (256, 1024, 512)])
def test_products_of_its_units_are_the_emulated_ones(
    shape: tuple[int, int, int], left: Float8Format, rows: bool
) -> None:
    if not has_units(GPU):
        pytest.skip("this GPU has no units for 8-bit floats")
    m, k, n = shape
    a, b = drawn(m, k).to(GPU), drawn(k, n, seed=1).to(GPU)
    a_scale = scale_from_amax(amax_of(a, 1 if rows else None), left)
    b_scale = scale_from_amax(amax_of(b, 0 if rows else None), E4M3)
    given = cast_float8(a, a_scale, left), a_scale, cast_float8(b, b_scale, E4M3), b_scale
    wanted = scaled_matmul_reference(*given, torch.float32)
    size = wanted.abs().max()
    for dtype in (torch.float32, torch.bfloat16):
        for fast, near in ((False, 2e-3), (True, 4e-3)):  # units add up in about 14 bits
            found = scaled_matmul(*given, dtype, fast=fast)
            error = float((found.float() - wanted).abs().max() / size)
            assert found.dtype == dtype and error < near + torch.finfo(dtype).eps, (dtype, fast, error)


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_a_layer_on_units_is_the_emulated_layer_within_rounding(rows: bool) -> None:
    if not has_units(GPU):
        pytest.skip("this GPU has no units for 8-bit floats")
    results = []
    torch._dynamo.reset()
    for emulated, compiled in ((True, False), (False, False), (False, True)):
        x = drawn(96, 64).bfloat16().to(GPU).requires_grad_()
        weight = drawn(128, 64, seed=1).to(GPU).requires_grad_()
        layer = torch.compile(float8_linear) if compiled else float8_linear
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, weight, None, CastRule(rows=rows, emulated=emulated))
        y.backward(drawn(96, 128, seed=2).bfloat16().to(GPU))
        results.append((y, x.grad, weight.grad))
    for emulated, *real in zip(*results, strict=True):
        for found in real:
            assert found.dtype == emulated.dtype
            assert (found.float() - emulated.float()).norm() < 5e-3 * emulated.float().norm()
