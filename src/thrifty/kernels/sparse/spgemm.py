"""SpGEMM: the matmul of two sparse matrices, with a sparse result.

There are two algorithms. By rows (Gustavson 1978), each row of the result sums the rows of B at the column indices of a
row of A. By outer products (OuterSPACE, Pal et al. 2018), each column of A is multiplied by the row of B with the same
index. All partial products are computed first, and then merged by rows. Both algorithms read each element of B once per
use. Outer products read A and B sequentially, but also write and read the partial products. Both add in the same order
and in float64, so their results are equal. Neither has a gradient.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.kernels.sparse import compiled_products
from thrifty.kernels.sparse.sparsity_pattern import rows_of


def spgemm_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return A (m, k) times B (k, n) row by row. A, B and the result have torch's CSR layout.

    Columns of the result ascend. Elements that cancel to zero are kept. Raises UsageError for other layouts or shapes.
    """
    _check(a, b)
    if not _is_native(a, b):
        return spgemm_reference(a, b)
    left, right = _parts(a), _parts(b)
    return _merged("spgemm_rows", (*left, *right, b.shape[1]), _partial_products(left, right), a, b)


def spgemm_outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the result (m, n) of `spgemm_rows`, computed by outer products."""
    _check(a, b)
    if not _is_native(a, b):
        return spgemm_reference(a, b)
    left, right = _parts(a), _parts(b)
    operands = *_by_columns(left, a.shape[1]), *right, *b.shape
    return _merged("spgemm_outer", operands, _partial_products(left, right), a, b)


def spgemm_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return the result (m, n) of `spgemm_rows`, computed by torch's matmul of COO matrices, without a compiler."""
    _check(a, b)
    operands = [matrix.detach().double().to_sparse_coo() for matrix in (a, b)]
    product = torch.sparse.mm(*operands).to_sparse_csr()
    return product.to(torch.promote_types(a.dtype, b.dtype))


def _check(a: Tensor, b: Tensor) -> None:
    if a.layout is not torch.sparse_csr or b.layout is not torch.sparse_csr:
        raise UsageError(
            f"SpGEMM requires CSR matrices, got {str(a.layout)!r} and {str(b.layout)!r}",
            fix="convert both with .to_sparse_csr()",
        )
    if a.shape[1] != b.shape[0]:
        raise UsageError(
            f"SpGEMM of {tuple(a.shape)} and {tuple(b.shape)}: A has {a.shape[1]} columns, but B has {b.shape[0]} rows",
            fix="pass B with as many rows as A has columns",
        )


def _parts(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row starts and columns in int64, and values in float64."""
    parts = matrix.crow_indices().long(), matrix.col_indices().long(), matrix.values().detach().double()
    return tuple(part.contiguous() for part in parts)  # type: ignore[return-value]


def _is_native(a: Tensor, b: Tensor) -> bool:
    return a.device.type == b.device.type == "cpu" and compiled_products.PRODUCTS.is_there()


def _partial_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Return the number of partial products of each row of the result, (m,)."""
    starts, columns, _ = left
    until = F.pad(right[0].diff()[columns].cumsum(0), (1, 0))
    return until[starts[1:]] - until[starts[:-1]]


def _by_columns(parts: Sequence[Tensor], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    starts, at, values = parts
    order = at.argsort(stable=True)
    rows = rows_of(starts)
    return F.pad(torch.bincount(at, minlength=columns).cumsum(0), (1, 0)), rows[order], values[order]


def _merged(name: str, arguments: Sequence[Tensor | int], counts: Tensor, a: Tensor, b: Tensor) -> Tensor:
    rooms = F.pad(counts.cumsum(0), (1, 0))
    columns, values = counts.new_empty(int(rooms[-1])), torch.empty(int(rooms[-1]), dtype=torch.float64)
    merged_counts = torch.zeros_like(counts)
    compiled_products.PRODUCTS.run(name, (*arguments, rooms, columns, values, merged_counts), len(counts))
    if bool((merged_counts < 0).any()):
        raise ThriftyError(
            f"SpGEMM needs 17 bytes per column in each thread, but there is no memory for {b.shape[1]:,} columns",
            fix="torch.set_num_threads(1); or multiply by a part of the columns of B at a time",
        )
    starts = F.pad(merged_counts.cumsum(0), (1, 0))
    compacted = columns.new_empty(int(starts[-1])), values.new_empty(int(starts[-1]))
    compiled_products.PRODUCTS.run("spgemm_close_up", (rooms, columns, values, starts, *compacted), len(counts))
    return _csr(merged_counts, *compacted, a, b)


def _csr(counts: Tensor, columns: Tensor, values: Tensor, a: Tensor, b: Tensor) -> Tensor:
    dtype, size = torch.promote_types(a.dtype, b.dtype), (a.shape[0], b.shape[1])
    starts = F.pad(counts.cumsum(0), (1, 0))
    return torch.sparse_csr_tensor(starts, columns, values.to(dtype), size, check_invariants=False)
