"""Walsh–Hadamard transform, and Fastfood: a random matrix that is applied without being stored.

Papers: Le, Sarlós and Smola 2013, Fastfood (arXiv 1408.3060), section 3. The use of Fastfood for a random subspace is
from Li et al. 2018 (arXiv 1804.08838), section S7.

A Hadamard matrix of size a · b is the Kronecker product of Hadamard matrices of sizes a and b. The transform of a row,
reshaped to (a, b), is therefore two matmuls with small matrices. On CPUs and accelerators this is faster than log2(n)
passes of sums and differences.

Shapes: r rows, n columns, a power of two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Number of elements per pass: few enough for the cache, enough for an efficient matmul."""
_LARGEST = 64


def hadamard_matrix(n: int, like: Tensor) -> Tensor:
    """Return the Hadamard matrix (n, n) with entries ±1."""
    matrix = like.new_ones(1, 1)
    step = like.new_tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < n:
        matrix = torch.kron(step, matrix)
    return matrix


def hadamard(x: Tensor) -> Tensor:
    """Return x H for x (r, n), by matmuls with matrices of at most 64 x 64.

    H is the Hadamard matrix with entries ±1 in Sylvester's order.
    """
    rest, n = x.shape[-1], x.shape[-1]
    stride = 1
    while rest > 1:
        size = min(rest, _LARGEST)
        matrix = hadamard_matrix(size, x)
        x = (x.view(-1, size) @ matrix) if stride == 1 else torch.matmul(matrix, x.view(-1, size, stride))
        rest, stride = rest // size, stride * size
    return x.reshape(-1, n)


@dataclass(frozen=True)
class Fastfood:
    """Random matrix P (total, dimension): a stack of blocks s H G Π H B, with a scalar s and the Hadamard matrix H.
    Each block has its own signs B and normal factors G. All blocks share the permutation Π. The variance of (P z)_i is
    the mean square of z.
    """

    dimension: int
    total: int
    signs: Tensor
    """Signs ±1 in int8, (r, n) for r blocks of size n; n is `dimension` rounded up to a power of two."""
    normals: Tensor
    """Normal factors in float32, (r, n)."""
    permutation: Tensor
    """Permutation Π, (n,)."""

    @property
    def width(self) -> int:
        return self.signs.shape[1]

    @property
    def scale(self) -> float:
        return (self.width * self.dimension) ** -0.5

    def _chunks(self) -> Iterator[slice]:
        rows = max(CHUNK // self.width, 1)
        for start in range(0, len(self.signs), rows):
            yield slice(start, start + rows)

    def apply(self, z: Tensor) -> Tensor:
        """Return P z (total,) in float32."""
        padded = torch.nn.functional.pad(z.float(), (0, self.width - self.dimension))
        out = torch.empty(self.signs.shape, dtype=torch.float32, device=z.device)
        for rows in self._chunks():
            mixed = hadamard(padded * self.signs[rows]).index_select(1, self.permutation)
            out[rows] = hadamard(mixed.mul_(self.normals[rows])).mul_(self.scale)
        return out.flatten()[: self.total]

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Return Pᵀ x (dimension,) in float32, for x (total,)."""
        padded = torch.nn.functional.pad(values.float(), (0, self.signs.numel() - self.total)).view(self.signs.shape)
        total = torch.zeros(self.width, dtype=torch.float32, device=values.device)
        back = self.permutation.argsort()
        for rows in self._chunks():
            mixed = hadamard(padded[rows]).mul_(self.normals[rows]).index_select(1, back)
            total += hadamard(mixed).mul_(self.signs[rows]).sum(0)
        return total[: self.dimension] * self.scale


def draw_fastfood(dimension: int, total: int, generator: torch.Generator, device: torch.device) -> Fastfood:
    """Return a random projection from `dimension` to `total` values. Random values are sampled on the generator's
    device, then moved to `device`.
    """
    width = 1 << (dimension - 1).bit_length()
    rows = -(-total // width)
    at = generator.device
    signs = torch.randint(0, 2, (rows, width), generator=generator, dtype=torch.int8, device=at).mul_(2).sub_(1)
    normals = torch.randn(rows, width, generator=generator, device=at)
    permutation = torch.randperm(width, generator=generator, device=at)
    return Fastfood(dimension, total, signs.to(device), normals.to(device), permutation.to(device))
