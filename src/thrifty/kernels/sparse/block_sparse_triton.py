"""Block-sparse matmuls in Triton for GPUs: the functions of `block_sparse_matrix.py`, one program per tile.

The module is imported only if Triton is installed. It was run only in Triton's interpreter, never on a GPU. Sums are in
float32, in the order of blocks or tokens. Products of float32 are exact, not TF32. The block width is a power of two,
at least 16.
"""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from thrifty.kernels.sparse.sparsity_pattern import rows_of

TOKENS = 64
"""Number of tokens per tile of results, and number of tokens that an SDDMM processes at once."""


@triton.jit
def _spmm_kernel(
    x, values, starts, columns, bias, y, tokens, inputs, outputs,
    has_bias: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    row, t = tl.program_id(0), tl.program_id(1) * tile + tl.arange(0, tile)
    lane = tl.arange(0, block)
    is_token = t[:, None] < tokens
    total = tl.zeros((tile, block), dtype=tl.float32)
    for p in range(tl.load(starts + row), tl.load(starts + row + 1)):
        column = tl.load(columns + p).to(tl.int64) * block
        rows_of_x = t.to(tl.int64)[:, None] * inputs + column + lane[None, :]
        inside = tl.load(x + rows_of_x, mask=is_token, other=0.0)
        # load the transpose (inputs, outputs) of a block that is stored as (outputs, inputs)
        transposed = tl.load(values + p * block * block + lane[None, :] * block + lane[:, None])
        total += tl.dot(inside, transposed, input_precision="ieee")
    if has_bias:
        total += tl.load(bias + row * block + lane).to(tl.float32)[None, :]
    place = t.to(tl.int64)[:, None] * outputs + row * block + lane[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=is_token)


@triton.jit
def _sddmm_kernel(
    left, right, rows, columns, values, tokens, inputs, outputs, block: tl.constexpr, tile: tl.constexpr
):  # fmt: skip
    p, lane = tl.program_id(0), tl.arange(0, block)
    row, column = tl.load(rows + p).to(tl.int64) * block, tl.load(columns + p).to(tl.int64) * block
    total = tl.zeros((block, block), dtype=tl.float32)
    for first in range(0, tokens, tile):
        t = (first + tl.arange(0, tile)).to(tl.int64)
        row_pointers = left + t[None, :] * outputs + row + lane[:, None]
        column_pointers = right + t[:, None] * inputs + column + lane[None, :]
        row_values = tl.load(row_pointers, mask=t[None, :] < tokens, other=0.0)
        column_values = tl.load(column_pointers, mask=t[:, None] < tokens, other=0.0)
        total += tl.dot(row_values, column_values, input_precision="ieee")
    place = p.to(tl.int64) * block * block + lane[:, None] * block + lane[None, :]
    tl.store(values + place, total.to(values.dtype.element_ty))


def spmm(x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Return the result of `BlockSparseMatrix.spmm`, (n, rows · b), for x (n, k) and values (blocks, b, b), with `rows`
    block rows.
    """
    tokens, inputs, block = *x.shape, values.shape[1]
    y = x.new_empty(tokens, rows * block)
    if y.numel():
        grid = (rows, triton.cdiv(tokens, TOKENS))
        tensors = x, values.contiguous(), starts, columns, x if bias is None else bias, y
        _spmm_kernel[grid](*tensors, tokens, inputs, rows * block, bias is not None, block, TOKENS)
    return y


def sddmm(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor, block: int) -> Tensor:
    """Return the result (blocks, b, b) of `BlockSparseMatrix.sddmm`, for left (n, m) and right (n, k)."""
    values = left.new_empty(len(columns), block, block)
    if len(columns):
        rows = rows_of(starts)
        sizes = len(left), right.shape[1], left.shape[1]
        _sddmm_kernel[(len(columns),)](left, right, rows, columns, values, *sizes, block, TOKENS)
    return values
