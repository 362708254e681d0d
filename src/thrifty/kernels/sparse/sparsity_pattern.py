"""Which places of a matrix (m, k) are kept, and the products that follow: what `Csr` and `Blocks` have in common."""

from dataclasses import dataclass
from typing import Protocol, Union

import torch
from torch import Tensor


class SparsityPattern(Protocol):
    """The kept places of a matrix S (m, k), whose values are given apart: by rows, or, turned, by columns."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def density(self) -> float: ...
    @property
    def T(self) -> Union["SparsityPattern", "TransposedPattern"]: ...

    def pick(self, matrix: Tensor) -> Tensor:
        """The values of a dense matrix (m, k) at the kept places."""
        ...

    def place(self, values: Tensor) -> Tensor:
        """A dense matrix (m, k) of the values, zero elsewhere."""
        ...

    def turn(self, values: Tensor) -> Tensor:
        """The values of the transpose, in its order."""
        ...

    def turn_back(self, turned: Tensor) -> Tensor: ...

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (n, k) Sᵀ + bias (m,), as (n, m)."""
        ...

    def spmm_turned(self, x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (n, m) S + bias (k,), as (n, k), of turned values."""
        ...

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        """The values of leftᵀ right at the kept places alone, for left (n, m) and right (n, k)."""
        ...


@dataclass(frozen=True, eq=False)
class TransposedPattern:
    """The transpose of a pattern, from the same tensors."""

    whole: SparsityPattern

    @property
    def T(self) -> SparsityPattern:
        return self.whole

    def turn(self, values: Tensor) -> Tensor:
        return self.whole.turn_back(values)

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.whole.spmm_turned(x, values, bias)

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        return self.whole.turn(self.whole.sddmm(right, left))


def rows_of(starts: Tensor) -> Tensor:
    """Return the row number of each kept weight, (nnz,), from the row starts (m + 1,)."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())
