"""Losses of 16-bit numbers on a GPU with a vocabulary that is no multiple of 64, which is filled up there."""

import pytest
import torch
from gpu_only import GPU, on_a_gpu

from thrifty.kernels.chunked_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytestmark = on_a_gpu


@pytest.mark.parametrize("has_bias", [False, True])
def test_losses_and_gradients_are_those_of_the_head_as_it_is(has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (700, 64), (257, 64), (257,)
    given = [torch.randn(size, generator=generator).bfloat16().to(GPU).requires_grad_() for size in sizes]
    targets = torch.randint(257, (700,), generator=generator).to(GPU)
    share = torch.full((700,), 1 / 700, device=GPU)
    bias = given[2] if has_bias else None
    found = []
    for loss, more in ((linear_cross_entropy, {"expected": share}), (linear_cross_entropy_reference, {})):
        losses, lse = loss(given[0], given[1], targets, bias=bias, **more)  # type: ignore[arg-type]
        used = given if has_bias else given[:2]
        found.append([losses, lse, *torch.autograd.grad((losses * share).sum(), used)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=3e-2, atol=3e-4)
