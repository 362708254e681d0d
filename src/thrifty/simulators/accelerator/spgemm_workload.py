"""Products of two sparse matrices (SpGEMM): the workload of accelerators for sparse matrices.

Only the sparsity patterns determine the simulated work. Sums of products are assumed to be nonzero."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import io, sparse

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.simulators.accelerator.measured_attention import fastest_seconds

DENSE_LIMIT = 2 * 1500**3
"""Maximum number of operations of a timed dense product."""
MOST = 10**8
"""Maximum number of nonzero values, of rows and of columns of a matrix."""


@dataclass(frozen=True, eq=False)
class SpgemmProduct:
    """The product of A (m, k) and B (k, n), in any sparse format of scipy. Duplicate entries are summed."""

    name: str
    a: sparse.csr_array
    b: sparse.csr_array

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            object.__setattr__(self, name, by_rows(getattr(self, name)))
        if self.a.shape[1] != self.b.shape[0]:
            raise UsageError(
                f"{self.name}: shapes {self.a.shape} and {self.b.shape} cannot be multiplied",
                fix="pass B with as many rows as A has columns",
            )
        if not self.a.nnz or not self.b.nnz:
            raise UsageError(
                f"{self.name}: a matrix has no nonzero values", fix="pass a matrix with at least one nonzero value"
            )

    @cached_property
    def columns(self) -> np.ndarray:
        """Number of nonzero values per column of A, (k,)."""
        return np.bincount(self.a.indices, minlength=self.a.shape[1]).astype(np.int64)

    @cached_property
    def rows(self) -> np.ndarray:
        """Number of nonzero values per row of B, (k,)."""
        return np.diff(self.b.indptr).astype(np.int64)

    @property
    def multiplies(self) -> int:
        return int(self.columns @ self.rows)

    @cached_property
    def chunks(self) -> np.ndarray:
        """For each row of the result, the number of nonempty rows of B that are summed, (m,)."""
        return self._by_row((self.rows > 0).astype(np.int64))

    @cached_property
    def partial(self) -> np.ndarray:
        """Number of partial products per row of the result, (m,)."""
        return self._by_row(self.rows)

    def _by_row(self, weight: np.ndarray) -> np.ndarray:
        summed = np.concatenate([[0], np.cumsum(weight[self.a.indices])])
        return summed[self.a.indptr[1:]] - summed[self.a.indptr[:-1]]

    @cached_property
    def result_counts(self) -> np.ndarray:
        """Number of nonzero values per row of the result, (m,)."""
        ones = [sparse.csr_array((np.ones(x.nnz, np.float32), x.indices, x.indptr), x.shape) for x in (self.a, self.b)]
        return np.diff((ones[0] @ ones[1]).indptr).astype(np.int64)

    @property
    def adds(self) -> int:
        return self.multiplies - int(self.result_counts.sum())

    @property
    def dense_macs(self) -> float:
        return float(self.a.shape[0]) * self.a.shape[1] * self.b.shape[1]

    @property
    def density(self) -> float:
        return self.a.nnz / (self.a.shape[0] * self.a.shape[1])


def by_rows(matrix: sparse.sparray | sparse.spmatrix) -> sparse.csr_array:
    """Return the matrix in CSR format with duplicate entries summed. The argument does not change."""
    rows = sparse.csr_array(matrix)
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


@dataclass(frozen=True, eq=False)
class SpgemmPhase:
    """A phase of a sparse product. A phase ends before the next phase begins."""

    product: SpgemmProduct
    name: str
    """ "multiply" or "merge"."""


def uniform(size: int, density: float, seed: int = 0) -> SpgemmProduct:
    """Return the product of a random (size, size) matrix with itself. Raises UsageError if the matrix is empty or too
    large.
    """
    if size < 1 or not 0 < density <= 1:
        raise UsageError(
            f"there is no matrix of {size} rows at density {density:g}", fix="pass a size >= 1 and a density in (0, 1]"
        )
    if (values := size**2 * density) > MOST:
        raise UsageError(
            f"{values:.1e} nonzero values exceed the limit of {MOST:.0e}", fix="use a smaller size or density"
        )
    matrix = sparse.random_array((size, size), density=density, rng=np.random.default_rng(seed), format="csr")
    return SpgemmProduct(f"{size} at density {density:g}", matrix, matrix)


def read_matrix(path: Path) -> SpgemmProduct:
    """Return A · A for a square matrix A of a Matrix Market file, else A · Aᵀ.

    Raises UsageError if the file is missing or too large, IntegrityError if the file is truncated or damaged.
    """
    if not path.is_file():
        raise UsageError(f"there is no matrix '{path}'", fix="pass a Matrix Market file (.mtx)")
    try:
        rows, columns, values, kind, *_ = io.mminfo(path)
        is_text = kind == "coordinate" and path.suffix == ".mtx"  # one line per value; compressed files are smaller
        if is_text and 2 * values > path.stat().st_size + 1:  # before memory for all values is allocated
            raise ValueError(f"the file is truncated: {values} values in {path.stat().st_size} bytes")
        if max(rows, columns, values) > MOST:
            size = f"{rows} rows, {columns} columns and {values} values"
            raise UsageError(f"'{path}' has {size}", fix=f"pass a matrix with at most {MOST:.0e} of each")
        matrix = sparse.csr_array(io.mmread(path, spmatrix=False))
    except (ValueError, TypeError, OverflowError, StopIteration, EOFError) as error:
        raise IntegrityError(
            f"'{path}' cannot be read as a Matrix Market file: {error}", fix="download or write the file again"
        ) from error
    matrix.sum_duplicates()  # before zeros are removed, because duplicate entries may cancel
    matrix.eliminate_zeros()
    if not np.isfinite(matrix.data).all():
        raise IntegrityError(f"'{path}' has NaN or infinite values", fix="remove these values from the file")
    square = matrix.shape[0] == matrix.shape[1]
    return SpgemmProduct(path.stem, matrix, matrix if square else sparse.csr_array(matrix.T))


def measured(product: SpgemmProduct, times: int = 3) -> dict[str, float | None]:
    """Return the seconds of the product on this machine, as the fastest of `times` runs.

    "gustavson" is scipy's row-wise product on one thread. "dense" is numpy's dense product, or None above
    `DENSE_LIMIT` operations.
    """
    gustavson = fastest_seconds(lambda: product.a @ product.b, times)
    if 2 * product.dense_macs > DENSE_LIMIT:
        return {"gustavson": gustavson, "dense": None}
    a, b = product.a.toarray(), product.b.toarray()
    return {"gustavson": gustavson, "dense": fastest_seconds(lambda: a @ b, times)}
