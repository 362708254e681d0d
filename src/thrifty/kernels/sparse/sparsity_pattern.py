"""Which places of a matrix (m, k) are kept, and the products that follow, for single weights and for whole blocks."""

from typing import Protocol

import torch
from torch import Tensor


class SparsityPattern(Protocol):
    """The kept places of a matrix S (m, k), whose values are given apart: by rows, or, turned, by columns."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def density(self) -> float: ...

    def pick(self, matrix: Tensor) -> Tensor:
        """The values of a dense matrix (m, k) at the kept places."""
        ...

    def place(self, values: Tensor) -> Tensor:
        """A dense matrix (m, k) of the values, zero elsewhere."""
        ...

    def turn(self, values: Tensor) -> Tensor:
        """The values of the transpose, in its order."""
        ...

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (n, k) Sᵀ + bias (m,), as (n, m)."""
        ...

    def spmm_turned(self, x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (n, m) S + bias (k,), as (n, k), of turned values."""
        ...

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        """The values of leftᵀ right at the kept places alone, for left (n, m) and right (n, k)."""
        ...


def rows_of(starts: Tensor) -> Tensor:
    """Return the row number of each kept weight, (nnz,), from the row starts (m + 1,)."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())
