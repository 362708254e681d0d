"""The Hadamard transform against its definition, and what Fastfood promises of a random matrix."""

import pytest
import scipy.linalg
import torch
from kernel_references import hadamard_reference

from thrifty.kernels.hadamard import draw_fastfood, hadamard, hadamard_matrix


def drawn(dimension: int, total: int, seed: int = 0):
    return draw_fastfood(dimension, total, torch.Generator().manual_seed(seed), torch.device("cpu"))


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128, 512, 4096])
def test_it_is_a_product_with_sylvesters_matrix(n: int) -> None:
    x = torch.randn(3, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    wanted = x @ torch.tensor(scipy.linalg.hadamard(n), dtype=torch.float64)
    for found in (hadamard(x), hadamard_reference(x), x @ hadamard_matrix(n, x)):
        torch.testing.assert_close(found, wanted)


def test_twice_is_n_times_once() -> None:
    x = torch.randn(5, 256, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x)), 256 * x)


@pytest.mark.parametrize(("dimension", "total"), [(1, 5), (7, 50), (64, 64), (100, 1000), (300, 40)])
def test_it_is_one_matrix_and_its_transpose(dimension: int, total: int) -> None:
    fastfood = drawn(dimension, total)
    matrix = torch.stack([fastfood.apply(row) for row in torch.eye(dimension)], 1)
    assert matrix.shape == (total, dimension)
    z, x = torch.randn(dimension), torch.randn(total)
    torch.testing.assert_close(fastfood.apply(z), matrix @ z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fastfood.apply_transposed(x), matrix.T @ x, rtol=1e-4, atol=1e-4)


def test_a_weight_moves_as_far_as_the_numbers_of_z_do() -> None:
    z = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    moved = drawn(1000, 200_000).apply(z)
    assert abs(moved.std() / z.std() - 1) < 0.02
    kurtosis = ((moved / moved.std()) ** 4).mean()
    assert abs(kurtosis - 3) < 0.2  # as a matrix of normal numbers gives


def test_its_columns_are_nearly_orthogonal_and_of_one_length() -> None:
    fastfood = drawn(32, 20_000)
    matrix = torch.stack([fastfood.apply(row) for row in torch.eye(32)], 1)
    gram = matrix.T @ matrix / (20_000 / 32)
    assert (gram - torch.eye(32)).abs().max() < 0.1


def test_it_is_a_function_of_the_seed() -> None:
    z = torch.randn(10)
    assert torch.equal(drawn(10, 100).apply(z), drawn(10, 100).apply(z))
    assert (drawn(10, 100, 1).apply(z) - drawn(10, 100).apply(z)).abs().max() > 0.1


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.randn(16)
    whole = drawn(16, 5000).apply(z)
    monkeypatch.setattr("thrifty.kernels.hadamard.CHUNK", 100)
    pieces = drawn(16, 5000)
    torch.testing.assert_close(pieces.apply(z), whole)
    torch.testing.assert_close(pieces.apply_transposed(whole), drawn(16, 5000).apply_transposed(whole))
