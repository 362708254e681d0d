"""Block-sparse matrices: SpMM and SDDMM at nearly the FLOP rate of dense matmuls.

A matrix S (m, k) has `values` (blocks, b, b), with outputs first. On a CPU b is 16; larger blocks are split into blocks
of 16. On a GPU, Triton kernels support any power of two of at least 16. Otherwise torch multiplies all blocks in one
batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.sparse import compiled_products
from thrifty.kernels.sparse.csr_matrix import LANES, TILE_BYTES, CsrMatrix
from thrifty.kernels.sparse.sparsity_pattern import rows_of

BATCH_BYTES = 2**26
"""Maximum bytes of block products that torch computes at once."""
SDDMM_TOKENS = 128


@dataclass(frozen=True, eq=False)
class BlockSparseMatrix:
    """`SparsityPattern` of whole blocks. Values are (blocks, b, b)."""

    grid: CsrMatrix
    """Positions of the blocks in the matrix of blocks (m / b, k / b)."""
    block: int
    at: tuple[Tensor, Tensor]
    """Block row and block column of each block, (blocks,) int64 each."""

    @classmethod
    def of(cls, mask: Tensor, block: int = LANES) -> "BlockSparseMatrix":
        """Return the pattern of all nonempty blocks of a mask (m, k). Raise UsageError if blocks do not fit."""
        kept = kept_blocks(mask, block)
        rows, columns = kept.nonzero(as_tuple=True)
        return cls(CsrMatrix.of(kept), block, (rows, columns))

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.grid.shape
        return rows * self.block, columns * self.block

    @property
    def density(self) -> float:
        return self.grid.density

    def _in_blocks(self, matrix: Tensor) -> Tensor:
        rows, columns = self.grid.shape
        return matrix.view(rows, self.block, columns, self.block).transpose(1, 2)

    def pick(self, matrix: Tensor) -> Tensor:
        return self._in_blocks(matrix.reshape(self.shape))[self.at]

    def place(self, values: Tensor) -> Tensor:
        dense = values.new_zeros(self.shape)
        self._in_blocks(dense).index_put_(self.at, values)
        return dense

    def turn(self, values: Tensor) -> Tensor:
        return self.grid.turn(values).transpose(1, 2)

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        return _spmm(x.contiguous(), values, self.grid.starts, self.grid.columns, bias, self.grid.shape[0])

    def spmm_turned(self, x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
        return _spmm(x.contiguous(), turned, self.grid.column_starts, self.grid.rows, bias, self.grid.shape[1])

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        return _sddmm(left.contiguous(), right.contiguous(), self.grid.starts, self.grid.columns, self.block)


def kept_blocks(mask: Tensor, block: int) -> Tensor:
    """Return a mask (m / b, k / b) of the blocks of a mask (m, k) that contain a True position."""
    rows, columns = mask.shape
    if rows % block or columns % block:
        raise UsageError(
            f"a matrix of {rows} x {columns} does not divide into blocks of {block} x {block}",
            fix="use CSR: CsrMatrix.of",
        )
    return mask.view(rows // block, block, columns // block, block).any(3).any(1)


def tokens_of_tile(inputs: int) -> int:
    """Return the number of tokens for which a tile with `inputs` inputs fits the cache."""
    return next((tokens for tokens in (128, 64, 32) if inputs * tokens * 4 <= TILE_BYTES), LANES)


def _is_native(block: int, *tensors: Tensor | None) -> bool:
    return block == LANES and compiled_products.native(*tensors)


@torch.library.custom_op("thrifty::block_spmm", mutates_args=())
def _spmm(x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    (tokens, inputs), block = x.shape, values.shape[1]
    if _has_triton(x):
        from thrifty.kernels.sparse.block_sparse_triton import spmm

        return spmm(x, values, starts, columns, bias, rows)
    if not _is_native(block, x, values, bias):
        return _spmm_by_torch(x, values, starts, columns, bias, rows)
    y, width = x.new_empty(tokens, rows * block), tokens_of_tile(inputs)
    transposed = values.transpose(1, 2).contiguous()  # inputs first
    sizes = (rows * block, inputs, tokens, width)
    compiled_products.PRODUCTS.run("block_spmm", (starts, columns, transposed, bias, x, y, *sizes), -(-tokens // width))
    return y


@_spmm.register_fake
def _(x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], rows * values.shape[1])


@torch.library.custom_op("thrifty::block_sddmm", mutates_args=())
def _sddmm(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor, block: int) -> Tensor:
    (tokens, outputs), inputs = left.shape, right.shape[1]
    if _has_triton(left):
        from thrifty.kernels.sparse.block_sparse_triton import sddmm

        return sddmm(left, right, starts, columns, block)
    if not _is_native(block, left, right):
        return _sddmm_by_torch(left, right, starts, columns, block)
    tiles, panels = -(-tokens // SDDMM_TOKENS), []
    for side, width in ((left, outputs), (right, inputs)):
        panels.append(side.new_empty(tiles * width * SDDMM_TOKENS))
        compiled_products.PRODUCTS.run("block_panels", (side, panels[-1], width, tokens, SDDMM_TOKENS), tiles)
    values = left.new_empty(len(columns), block, block)
    sizes = (outputs, inputs, SDDMM_TOKENS, tiles)
    compiled_products.PRODUCTS.run("block_sddmm", (starts, columns, *panels, values, *sizes), outputs // block)
    return values


@_sddmm.register_fake
def _(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor, block: int) -> Tensor:
    return left.new_empty(columns.shape[0], block, block)


def _has_triton(x: Tensor) -> bool:
    if x.device.type != "cuda":
        return False
    from torch.utils._triton import has_triton

    return has_triton()


def _by_block(x: Tensor, block: int) -> Tensor:
    """Return x (n, k) as blocks (k / b, n, b)."""
    return x.view(len(x), x.shape[1] // block, block).transpose(0, 1)


def _spmm_by_torch(
    x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    (tokens, _), block = x.shape, values.shape[1]
    inputs, at, y = _by_block(x, block), rows_of(starts), x.new_zeros(rows, tokens, block)
    most = max(BATCH_BYTES // max(tokens * block * x.element_size(), 1), 1)
    for own, blocks, to in zip(columns.split(most), values.split(most), at.split(most), strict=True):
        y.index_add_(0, to, inputs[own] @ blocks.transpose(1, 2))
    y = y.transpose(0, 1).reshape(tokens, rows * block)
    return y if bias is None else y + bias


def _sddmm_by_torch(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor, block: int) -> Tensor:
    outputs, inputs, at = _by_block(left, block), _by_block(right, block), rows_of(starts)
    most = max(BATCH_BYTES // max(len(left) * block * left.element_size(), 1), 1)
    parts = [outputs[i].transpose(1, 2) @ inputs[j] for i, j in zip(at.split(most), columns.split(most), strict=True)]
    return torch.cat(parts)


FLOPS_OF[torch.ops.thrifty.block_spmm] = lambda x, values, *rest, **others: 2 * len(x) * values.numel()
FLOPS_OF[torch.ops.thrifty.block_sddmm] = lambda left, right, starts, columns, block, **others: (
    2 * len(left) * columns.numel() * block**2
)
