"""Quantization on a GPU equals the CPU except for rounding; FP8 hardware products equal emulated ones."""

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


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("size, dtype", SIZES)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gpu_quantization_is_unbiased_and_near_the_cpu(size: int, bits: int, zeros: bool, dtype: torch.dtype) -> None:
    """Rounding may change the last bit of a step, and so a few codes of its group."""
    tensor = normal(size, dtype=dtype)
    tensor[::7] = 0
    on_gpu = tensor.to(GPU)
    total = torch.zeros(size, dtype=torch.float64, device=GPU)
    for seed in range(DRAWS):
        quantized = quantize_tensor(on_gpu, bits, seed, None, zeros)
        assert quantized is not None
        back = quantized.decode()
        total += back.double() - on_gpu.double()
    steps = quantized.step.double().repeat_interleave(quantized.ranges.width)[:size]
    assert bool(((back.double() - on_gpu.double()).abs() <= 1.01 * steps + 1e-2 * on_gpu.double().abs()).all())
    assert not zeros or not bool(back[on_gpu == 0].any())
    assert abs(float((total / DRAWS / steps).mean())) < 4 * 0.5 / (DRAWS * size) ** 0.5 + 1e-3
    here, there = quantize_tensor(tensor, bits, 5, None, zeros), quantize_tensor(on_gpu, bits, 5, None, zeros)
    assert here is not None and there is not None
    assert (here.codes == there.codes.cpu()).double().mean() > 0.9


def test_packed_masks_are_exact() -> None:
    mask = normal(3, 70_001).to(GPU) > 0.3
    assert torch.equal(pack_mask(mask).decode(), mask)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_cast_of_every_16_bit_value_equals_cpu(format: Float8Format, dtype: torch.dtype) -> None:
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
def test_fp8_hardware_products_equal_emulated_ones(shape: tuple[int, int, int], left: Float8Format, rows: bool) -> None:
    if not has_units(GPU):
        pytest.skip("this GPU has no FP8 hardware")
    m, k, n = shape
    a, b = normal(m, k).to(GPU), normal(k, n, seed=1).to(GPU)
    a_scale = scale_from_amax(amax_of(a, 1 if rows else None), left)
    b_scale = scale_from_amax(amax_of(b, 0 if rows else None), E4M3)
    operands = cast_float8(a, a_scale, left), a_scale, cast_float8(b, b_scale, E4M3), b_scale
    expected = scaled_matmul_reference(*operands, torch.float32)
    size = expected.abs().max()
    for dtype in (torch.float32, torch.bfloat16):
        for fast, near in ((False, 2e-3), (True, 4e-3)):  # the hardware accumulates in about 14 bits
            actual = scaled_matmul(*operands, dtype, fast=fast)
            error = float((actual.float() - expected).abs().max() / size)
            assert actual.dtype == dtype and error < near + torch.finfo(dtype).eps, (dtype, fast, error)


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_fp8_layer_on_hardware_equals_emulated_layer(rows: bool) -> None:
    if not has_units(GPU):
        pytest.skip("this GPU has no FP8 hardware")
    results = []
    torch._dynamo.reset()
    for emulated, compiled in ((True, False), (False, False), (False, True)):
        x = normal(96, 64).bfloat16().to(GPU).requires_grad_()
        weight = normal(128, 64, seed=1).to(GPU).requires_grad_()
        layer = torch.compile(float8_linear) if compiled else float8_linear
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, weight, None, CastRule(rows=rows, emulated=emulated))
        y.backward(normal(96, 128, seed=2).bfloat16().to(GPU))
        results.append((y, x.grad, weight.grad))
    for emulated, *real in zip(*results, strict=True):
        for actual in real:
            assert actual.dtype == emulated.dtype
            assert (actual.float() - emulated.float()).norm() < 5e-3 * emulated.float().norm()
