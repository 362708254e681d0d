"""Sparsity patterns (the kept positions of a matrix) and their matmuls, for single weights and whole blocks."""

from typing import Protocol

import torch
from torch import Tensor


class SparsityPattern(Protocol):
    """Kept positions of a matrix S (m, k). Values are stored separately, by rows, or for the transpose by columns."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def density(self) -> float: ...

    def pick(self, matrix: Tensor) -> Tensor:
        """Return the values of a dense matrix (m, k) at the kept positions."""
        ...

    def place(self, values: Tensor) -> Tensor:
        """Return a dense matrix (m, k) with the values at the kept positions, and zeros at all others."""
        ...

    def turn(self, values: Tensor) -> Tensor:
        """Return the values of the transpose, in the transpose's order."""
        ...

    def spmm(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x Sᵀ + bias (n, m), for x (n, k) and bias (m,)."""
        ...

    def spmm_turned(self, x: Tensor, turned: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x S + bias (n, k), for x (n, m), bias (k,) and values of the transpose."""
        ...

    def sddmm(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the values of leftᵀ right at the kept positions only, for left (n, m) and right (n, k)."""
        ...


def rows_of(starts: Tensor) -> Tensor:
    """Return the row index of each kept weight, (nnz,), from row starts (m + 1,)."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())
