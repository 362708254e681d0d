"""Losses in 16 bits on a GPU with a vocabulary that is not a multiple of 64, which is padded there."""

import pytest
import torch
from gpu_only import GPU, on_a_gpu

from thrifty.kernels.chunked_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytestmark = on_a_gpu


@pytest.mark.parametrize("has_bias", [False, True])
def test_losses_and_gradients_of_padded_head_equal_reference(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (700, 64), (257, 64), (257,)
    inputs = [torch.randn(size, generator=generator).bfloat16().to(GPU).requires_grad_() for size in sizes]
    targets = torch.randint(257, (700,), generator=generator).to(GPU)
    share = torch.full((700,), 1 / 700, device=GPU)
    bias = inputs[2] if has_bias else None
    results = []
    for loss, more in ((linear_cross_entropy, {"expected": share}), (linear_cross_entropy_reference, {})):
        losses, lse = loss(inputs[0], inputs[1], targets, bias=bias, **more)  # type: ignore[arg-type]
        used = inputs if has_bias else inputs[:2]
        results.append([losses, lse, *torch.autograd.grad((losses * share).sum(), used)])
    for mine, theirs in zip(*results, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=3e-2, atol=3e-4)
