"""Sparse matrices in CSR format, with single weights at any position: SpMM and SDDMM.

A matrix S (m, k) has `values` (nnz,) at the positions of a pattern. Compiled code adds in the order of columns or
tokens, for any number of threads. Without a compiler, torch's own kernels are used.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.sparse import compiled_products

LANES = 16
"""Number of tokens per vector."""
TILE_BYTES = 2**19
"""Maximum bytes of a tile of inputs. Half a megabyte fits a core's cache."""
SDDMM_TOKENS = 8 * LANES


@dataclass(frozen=True, eq=False)
class CsrMatrix:
    """`SparsityPattern` of single weights. It uses 24 bytes per weight."""

    shape: tuple[int, int]
    starts: Tensor
    """Start of each row in `columns`, (m + 1,) int64."""
    columns: Tensor
    """Column of each weight, (nnz,) int32, ascending in each row."""
    places: Tensor
    """Position of each weight in the flattened matrix, (nnz,) int64."""
    order: Tensor
    """Column-major order of the weights, as indices into the row-major order, (nnz,) int64."""
    column_starts: Tensor
    rows: Tensor
    """Row of each weight in column-major order, (nnz,) int32."""

    @classmethod
    def of(cls, mask: Tensor) -> "CsrMatrix":
        """Return the pattern of the True positions of a mask (m, k)."""
        rows, columns = mask.nonzero(as_tuple=True)
        order = columns.argsort(stable=True)
        by_rows = _starts(mask.sum(1)), columns.int(), rows * mask.shape[1] + columns
        return cls((mask.shape[0], mask.shape[1]), *by_rows, order, _starts(mask.sum(0)), rows[order].int())

    @property
    def density(self) -> float:
        return len(self.columns) / max(self.shape[0] * self.shape[1], 1)

    def pick(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(-1).index_select(0, self.places)

    def place(self, values: Tensor) -> Tensor:
        dense = values.new_zeros(self.shape[0] * self.shape[1])
        return dense.scatter_(0, self.places, values).view(self.shape)

    def turn(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.order)

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        return _spmm(x.contiguous(), values.contiguous(), self.starts, self.columns, bias, self.shape[0])

    def spmm_turned(self, x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
        return _spmm(x.contiguous(), turned.contiguous(), self.column_starts, self.rows, bias, self.shape[1])

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        return _sddmm(left.contiguous(), right.contiguous(), self.starts, self.columns)


def _starts(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))


def vectors_of_tile(inputs: int) -> int:
    """Return the number of token vectors for which a tile with `inputs` inputs fits the cache."""
    return next((v for v in (8, 4, 2) if inputs * v * LANES * 4 <= TILE_BYTES), 1)


@torch.library.custom_op("thrifty::csr_spmm", mutates_args=())
def _spmm(x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    tokens, inputs = x.shape
    if not compiled_products.native(x, values, bias):
        return _spmm_by_torch(x, values, starts, columns, bias, outputs)
    y = x.new_empty(tokens, outputs)
    vectors = vectors_of_tile(inputs)
    sizes = (outputs, inputs, tokens, vectors)
    compiled_products.PRODUCTS.run(
        "csr_spmm", (starts, columns, values, bias, x, y, *sizes), -(-tokens // (vectors * LANES))
    )
    return y


@_spmm.register_fake
def _(x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(x.shape[0], outputs)


@torch.library.custom_op("thrifty::csr_sddmm", mutates_args=())
def _sddmm(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor) -> Tensor:
    (tokens, outputs), inputs = left.shape, right.shape[1]
    if not compiled_products.native(left, right):
        pattern = _torch_csr(left.new_zeros(len(columns)), starts, columns, (outputs, inputs))
        return torch.sparse.sampled_addmm(pattern, left.T, right, beta=0.0).values()
    tiles = -(-tokens // SDDMM_TOKENS)
    transposed = []
    for side, width in ((left, outputs), (right, inputs)):
        transposed.append(side.new_empty(tiles * width * SDDMM_TOKENS))
        compiled_products.PRODUCTS.run("csr_turn", (side, transposed[-1], width, tokens, SDDMM_TOKENS), tiles)
    values = left.new_empty(len(columns))
    compiled_products.PRODUCTS.run("csr_sddmm", (starts, columns, *transposed, values, outputs, inputs, tiles), outputs)
    return values


@_sddmm.register_fake
def _(left: Tensor, right: Tensor, starts: Tensor, columns: Tensor) -> Tensor:
    return left.new_empty(columns.shape[0])


def _spmm_by_torch(
    x: Tensor, values: Tensor, starts: Tensor, columns: Tensor, bias: Tensor | None, outputs: int
) -> Tensor:
    matrix = _torch_csr(values, starts, columns, (outputs, x.shape[1]))
    if x.device.type == "cpu" and not torch.backends.mkl.is_available():
        return F.linear(x, matrix.to_dense(), bias)  # without MKL, torch has no sparse matmul on a CPU
    product = torch.sparse.mm(matrix, x.T).T
    return (product if bias is None else product + bias).contiguous()


def _torch_csr(values: Tensor, starts: Tensor, columns: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.sparse_csr_tensor(starts, columns.to(starts.dtype), values, shape, check_invariants=False)


FLOPS_OF[torch.ops.thrifty.csr_spmm] = lambda x, values, *rest, **others: 2 * len(x) * values.numel()
FLOPS_OF[torch.ops.thrifty.csr_sddmm] = lambda left, right, starts, columns, **others: 2 * len(left) * columns.numel()
