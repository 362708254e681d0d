"""Products of two sparse matrices: the workload of accelerators that are not for attention.

Patterns alone decide what an accelerator does, so values are taken for such that nothing cancels.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import io, sparse

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.simulators.accelerator.measured_attention import fastest_seconds

DENSE_LIMIT = 2 * 1500**3
"""Operations of a dense product beyond which it is not timed."""
MOST = 10**8
"""Numbers, rows and columns of a matrix."""


@dataclass(frozen=True, eq=False)
class SpgemmProduct:
    """A (m, k) times B (k, n), in any of scipy's sparse formats; numbers at one place are taken together."""

    name: str
    a: sparse.csr_array
    b: sparse.csr_array

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            object.__setattr__(self, name, by_rows(getattr(self, name)))
        if self.a.shape[1] != self.b.shape[0]:
            raise UsageError(
                f"{self.name}: {self.a.shape} times {self.b.shape} is no product", fix="give as many columns as rows"
            )
        if not self.a.nnz or not self.b.nnz:
            raise UsageError(f"{self.name}: a matrix without a number makes no product", fix="give one that has some")

    @cached_property
    def columns(self) -> np.ndarray:
        """(k,) numbers in each column of A."""
        return np.bincount(self.a.indices, minlength=self.a.shape[1]).astype(np.int64)

    @cached_property
    def rows(self) -> np.ndarray:
        """(k,) numbers in each row of B."""
        return np.diff(self.b.indptr).astype(np.int64)

    @property
    def multiplies(self) -> int:
        return int(self.columns @ self.rows)

    @cached_property
    def chunks(self) -> np.ndarray:
        """(m,) rows of B that each row of the result is the sum of, empty ones left out."""
        return self._by_row((self.rows > 0).astype(np.int64))

    @cached_property
    def partial(self) -> np.ndarray:
        """(m,) products that each row of the result is made of."""
        return self._by_row(self.rows)

    def _by_row(self, weight: np.ndarray) -> np.ndarray:
        summed = np.concatenate([[0], np.cumsum(weight[self.a.indices])])
        return summed[self.a.indptr[1:]] - summed[self.a.indptr[:-1]]

    @cached_property
    def found(self) -> np.ndarray:
        """(m,) numbers in each row of the result."""
        ones = [sparse.csr_array((np.ones(x.nnz, np.float32), x.indices, x.indptr), x.shape) for x in (self.a, self.b)]
        return np.diff((ones[0] @ ones[1]).indptr).astype(np.int64)

    @property
    def adds(self) -> int:
        return self.multiplies - int(self.found.sum())

    @property
    def dense_macs(self) -> float:
        return float(self.a.shape[0]) * self.a.shape[1] * self.b.shape[1]

    @property
    def density(self) -> float:
        return self.a.nnz / (self.a.shape[0] * self.a.shape[1])


def by_rows(matrix: sparse.sparray | sparse.spmatrix) -> sparse.csr_array:
    """The same matrix in CSR, each number once; a copy where it was not so."""
    rows = sparse.csr_array(matrix)
    if not rows.has_canonical_format:
        rows = rows.copy()
        rows.sum_duplicates()
    return rows


@dataclass(frozen=True, eq=False)
class SpgemmPhase:
    """A part of a product that must be over before the next begins."""

    product: SpgemmProduct
    name: str
    """ "multiply" or "merge"."""


def uniform(size: int, density: float, seed: int = 0) -> SpgemmProduct:
    """A square matrix with numbers anywhere, times itself. Raises UsageError for what leaves it empty."""
    if size < 1 or not 0 < density <= 1:
        raise UsageError(f"{size} rows at density {density:g} are no matrix", fix="give a density in (0, 1]")
    if (numbers := size**2 * density) > MOST:
        raise UsageError(f"{numbers:.1e} numbers are more than can be drawn here", fix=f"up to {MOST:.0e}")
    drawn = sparse.random_array((size, size), density=density, rng=np.random.default_rng(seed), format="csr")
    return SpgemmProduct(f"{size} at density {density:g}", drawn, drawn)


def read_matrix(path: Path) -> SpgemmProduct:
    """The square of a matrix of a Matrix Market file, or A times its transpose where that is not square. Raises
    UsageError for a file that is none, IntegrityError for one that is cut short or damaged."""
    if not path.is_file():
        raise UsageError(f"there is no matrix {path}", fix="give a Matrix Market file (.mtx)")
    try:
        rows, columns, numbers, kind, *_ = io.mminfo(path)
        written = kind == "coordinate" and path.suffix == ".mtx"  # line by line: less where symmetric, or compressed
        if written and 2 * numbers > path.stat().st_size + 1:  # before as much memory is asked for
            raise ValueError(f"it is cut short: {numbers} numbers in {path.stat().st_size} bytes")
        if max(rows, columns, numbers) > MOST:
            size = f"{rows} rows, {columns} columns and {numbers} numbers"
            raise UsageError(f"{path} has {size}", fix=f"give no more than {MOST:.0e} of each")
        matrix = sparse.csr_array(io.mmread(path, spmatrix=False))
    except (ValueError, TypeError, OverflowError, StopIteration, EOFError) as error:
        raise IntegrityError(f"{path} is no undamaged Matrix Market file: {error}") from error
    matrix.sum_duplicates()  # before zeros are left out: numbers at one place may cancel
    matrix.eliminate_zeros()
    if not np.isfinite(matrix.data).all():
        raise IntegrityError(f"{path} holds what is no number")
    square = matrix.shape[0] == matrix.shape[1]
    return SpgemmProduct(path.stem, matrix, matrix if square else sparse.csr_array(matrix.T))


def measured(product: SpgemmProduct, times: int = 3) -> dict[str, float | None]:
    """Seconds of the product on this machine: row by row (Gustavson's, one thread) by scipy, and as a dense one by
    numpy where that is no more than DENSE_LIMIT operations. The fastest of so many."""
    gustavson = fastest_seconds(lambda: product.a @ product.b, times)
    if 2 * product.dense_macs > DENSE_LIMIT:
        return {"gustavson": gustavson, "dense": None}
    a, b = product.a.toarray(), product.b.toarray()
    return {"gustavson": gustavson, "dense": fastest_seconds(lambda: a @ b, times)}
