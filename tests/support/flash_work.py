"""Flash attention in Triton against torch's own, in a process of its own: Triton asks when it is imported whether its
interpreter is wanted."""

import torch
import torch.nn.functional as F

from thrifty.core.errors import UsageError
from thrifty.kernels import flash_attention_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(tokens: int, heads: int, sharing: int, causal: bool, texts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (2, heads, tokens, 16), *[(2, heads // sharing, tokens, 16)] * 2
    qkv = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator).to(DEVICE)
    segments = torch.randint(0, texts, (2, tokens), generator=generator).sort(-1).values.to(DEVICE)
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    if causal:
        mask = mask.tril()
    expected = F.scaled_dot_product_attention(*qkv, mask, enable_gqa=sharing > 1)
    found = flash_attention_triton.flash_attention(*qkv, causal, segments if texts > 1 else None, tile=16)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(each, qkv, upstream) for each in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def check_refusals() -> None:
    for width, keys in ((24, 8), (8, 8), (16, 9)):
        q, k = torch.zeros(1, 2, 8, width), torch.zeros(1, 2, keys, width)
        try:
            flash_attention_triton.flash_attention(q, k, k)
        except UsageError as refused:
            assert "a power of two" in (refused.fix or "")
        else:
            raise AssertionError(f"heads of {width} over {keys} keys were taken")


if __name__ == "__main__":
    cases = [(tokens, 2, 1, causal, 1) for tokens in (1, 37) for causal in (True, False)]
    cases += [(37, 4, 2, True, 1), (37, 2, 1, True, 3), (37, 4, 2, False, 3)]
    for case in cases:
        check(*case)
    check_refusals()
    print("checked", len(cases))
