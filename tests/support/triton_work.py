"""Block-sparse products in Triton against dense ones, in a process of its own: Triton asks when it is imported whether
its interpreter is wanted."""

import torch
import torch.nn.functional as F

from thrifty.kernels.sparse import block_sparse_triton
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(block: int, tokens: int, density: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    grid = torch.rand(4, 3, generator=generator) < density
    mask = grid.repeat_interleave(block, 0).repeat_interleave(block, 1).to(DEVICE)
    shapes = (tokens, 3 * block), (tokens, 4 * block), (4 * block, 3 * block), (4 * block,)
    x, upstream, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes)
    pattern = BlockSparseMatrix.of(mask, block)
    starts, columns, values = pattern.grid.starts, pattern.grid.columns, pattern.pick(weight * mask)
    for added in (None, bias):
        found = block_sparse_triton.spmm(x, values, starts, columns, added, len(starts) - 1)
        torch.testing.assert_close(found, F.linear(x, weight * mask, added), rtol=1e-5, atol=1e-4)
    found = block_sparse_triton.sddmm(upstream, x, starts, columns, block)
    torch.testing.assert_close(found, pattern.pick(upstream.T @ x), rtol=1e-5, atol=1e-4)


if __name__ == "__main__":
    checked = 0
    for block in (16, 32):
        for tokens in (1, 70, 128):
            for density in (0.0, 0.5):
                check(block, tokens, density)
                checked += 1
    print("checked", checked)
