"""Hadamard transform compared with its definition, and properties of Fastfood as a random matrix."""

import pytest
import scipy.linalg
import torch
from kernel_references import hadamard_reference

from thrifty.kernels.hadamard import draw_fastfood, hadamard, hadamard_matrix


def sample_fastfood(dimension: int, total: int, seed: int = 0):
    return draw_fastfood(dimension, total, torch.Generator().manual_seed(seed), torch.device("cpu"))


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128, 512, 4096])
def test_hadamard_equals_product_with_sylvester_matrix(n: int) -> None:
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    expected = x @ torch.tensor(scipy.linalg.hadamard(n), dtype=torch.float64)
    for actual in (hadamard(x), hadamard_reference(x), x @ hadamard_matrix(n, x)):
        torch.testing.assert_close(actual, expected)


def test_hadamard_twice_is_n_times_identity() -> None:
    x = torch.randn(5, 256, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), 256 * x)


@pytest.mark.parametrize(("dimension", "total"), [(1, 5), (7, 50), (64, 64), (100, 1000), (300, 40)])
def test_fastfood_is_one_matrix_and_its_transpose(dimension: int, total: int) -> None:
    fastfood = sample_fastfood(dimension, total)
    matrix = torch.stack([fastfood.apply(row) for row in torch.eye(dimension)], 1)
    assert matrix.shape == (total, dimension)
    z, x = torch.randn(dimension), torch.randn(total)
    torch.testing.assert_close(fastfood.apply(z), matrix @ z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fastfood.apply_transposed(x), matrix.T @ x, rtol=1e-4, atol=1e-4)


def test_projected_values_have_the_variance_of_z() -> None:
    z = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    moved = sample_fastfood(1000, 200_000).apply(z)
    assert abs(moved.std() / z.std() - 1) < 0.02
    kurtosis = ((moved / moved.std()) ** 4).mean()
    assert abs(kurtosis - 3) < 0.2  # like a matrix of normal values


def test_columns_are_nearly_orthonormal() -> None:
    fastfood = sample_fastfood(32, 20_000)
    matrix = torch.stack([fastfood.apply(row) for row in torch.eye(32)], 1)
    gram = matrix.T @ matrix / (20_000 / 32)
    assert (gram - torch.eye(32)).abs().max() < 0.1


def test_fastfood_is_reproducible_by_seed() -> None:
    z = torch.randn(10)
    assert torch.equal(sample_fastfood(10, 100).apply(z), sample_fastfood(10, 100).apply(z))
    assert (sample_fastfood(10, 100, 1).apply(z) - sample_fastfood(10, 100).apply(z)).abs().max() > 0.1


def test_chunk_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(16)
    whole = sample_fastfood(16, 5000).apply(z)
    monkeypatch.setattr("thrifty.kernels.hadamard.CHUNK", 100)
    pieces = sample_fastfood(16, 5000)
    torch.testing.assert_close(pieces.apply(z), whole)
    torch.testing.assert_close(pieces.apply_transposed(whole), sample_fastfood(16, 5000).apply_transposed(whole))
