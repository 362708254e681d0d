"""OuterSPACE's counts, traffic and time for uniform random matrices (Pal et al., HPCA 2018).

Published times are digitized from the paper's figure (grade R), for matrices of the same sizes and densities. Traffic
is from the released results of TeAAL's model (MICRO 2023)."""

import gzip
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import io, sparse

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate, simulate_product
from thrifty.simulators.accelerator.designs.outerspace import merge_passes, traffic
from thrifty.simulators.accelerator.spgemm_workload import SpgemmProduct, measured, read_matrix, uniform
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

MACHINE = find_machine("outerspace")
PUBLISHED = {
    # rows: density, milliseconds of the paper; TeAAL's products, and TeAAL's bytes of A, B, T and Z
    4_986: (8e-3, 7.608, 7_975_976, (2_422_928, 2_422_968, 193_058_712, 81_874_864)),
    9_987: (2e-3, 3.652, 3_984_096, (2_453_160, 2_453_008, 2 * 48_646_856, 46_887_608)),
    19_937: (5e-4, 2.530, 1_987_858, (2_507_896, 2_507_632, 49_460_072, 23_833_992)),
    39_888: (1.3e-4, 1.791, 1_072_202, (2_721_936, 2_707_496, 27_696_728, 12_941_600)),
    79_730: (3.1e-5, 1.715, 488_667, (2_844_400, 2_633_688, 13_811_848, 6_009_584)),
}
"""Published rows. For the second row, T was released as 48,646,856, which is one direction. Other rows count both."""


@pytest.fixture(scope="module")
def products() -> dict[int, SpgemmProduct]:
    return {size: uniform(size, row[0]) for size, row in PUBLISHED.items()}


@pytest.mark.parametrize("size", PUBLISHED)
def test_time_is_within_30_percent_of_the_paper(size: int, products: dict) -> None:
    result = simulate_product(MACHINE, products[size])
    assert result.seconds * 1e3 == pytest.approx(PUBLISHED[size][1], rel=0.3)
    at_bandwidth = sum(traffic(products[size], MACHINE).values()) / 128e9
    assert PUBLISHED[size][1] / 1e3 > 3 * at_bandwidth  # bandwidth alone is three to nine times too fast
    assert result.seconds > 3 * at_bandwidth


@pytest.mark.parametrize("size", PUBLISHED)
def test_traffic_by_operand_is_within_5_percent_of_teaal(size: int, products: dict) -> None:
    _, _, multiplies, sizes = PUBLISHED[size]
    result = traffic(products[size], MACHINE)
    assert products[size].multiplies == pytest.approx(multiplies, rel=0.02)  # different random matrices
    for ours, theirs in zip(result.values(), sizes, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    least = [sum(moved) / (moved[0] + moved[1] + moved[3]) for moved in (tuple(result.values()), sizes)]
    assert least[0] == pytest.approx(least[1], rel=0.05)


matrices = st.builds(
    lambda seed, m, k, n, density: SpgemmProduct(
        "random",
        *(
            sparse.csr_array((np.random.default_rng(seed + part).random(shape) < density) + corner(shape))
            for part, shape in enumerate(((m, k), (k, n)))
        ),
    ),
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 0.9),
)  # fmt: skip


def corner(shape: tuple[int, int]) -> np.ndarray:
    """Return a matrix with one nonzero value, so that no sum is empty."""
    return np.pad(np.ones((1, 1)), ((0, shape[0] - 1), (0, shape[1] - 1)))


@given(matrices)
@settings(max_examples=40, deadline=None)
def test_counts_equal_plain_loops(product: SpgemmProduct) -> None:
    a, b = product.a.toarray(), product.b.toarray()
    multiplies, places, chunks = 0, set(), set()
    for i, k in zip(*np.nonzero(a), strict=True):
        for j in np.flatnonzero(b[k]):
            multiplies += 1
            places.add((int(i), int(j)))
            chunks.add((int(i), int(k)))
    assert product.multiplies == multiplies == product.partial.sum()
    assert product.adds == multiplies - len(places) and product.result_counts.sum() == len(places)
    assert product.chunks.sum() == len(chunks)
    result = simulate_product(MACHINE, product)
    assert result.layers[0].macs == multiplies and result.cycles >= sum(layer.bound for layer in result.layers) > 0
    assert sum(l.read + l.written for l in result.layers) == pytest.approx(  # noqa: E741
        sum(traffic(product, MACHINE).values())
    )


def test_both_phases_by_hand_calculation() -> None:
    """One value times a row of three. Multiply: assign (150 cycles), fetch (150), multiply (3). Merge: the list's
    header and three values (150 · 4 + 3 · 1). Transfers run at 16 / 3 bytes per cycle."""
    product = SpgemmProduct("one", sparse.csr_array(np.array([[2.0]])), sparse.csr_array(np.array([[1.0, 2.0, 3.0]])))
    multiply, merge = simulate_product(MACHINE, product).layers
    moved = 12 + (12 * 3 + 6) + (12 * 3 + 4)
    assert multiply.cycles == 150 + 153 + int(np.ceil(moved * 3 / 16))
    assert merge.cycles == 150 * 4 + 3 + int(np.ceil((12 * 3 + 4 + 4 + 12 * 3 + 4) * 3 / 16))


def test_time_depends_on_latency_more_than_bandwidth(products: dict) -> None:
    product = products[9_987]
    plain = simulate_product(MACHINE, product)
    near = simulate_product(MACHINE.replaced("memories.dram.latency", 5e-8), product)
    wide = simulate_product(limit_resources(MACHINE, bandwidth=32e9), product)
    assert near.cycles < 0.6 * plain.cycles and wide.cycles > 0.9 * plain.cycles
    assert near.seconds * 1e3 < 0.7 * PUBLISHED[9_987][1]


def test_rows_beyond_the_cache_are_read_again() -> None:
    a = sparse.csr_array(np.ones((40, 1)))
    short, long = (SpgemmProduct("p", a, sparse.csr_array(np.ones((1, n)))) for n in (1000, 2000))
    once, again = (traffic(product, MACHINE)["B"] for product in (short, long))
    assert once == 12 * 1000 + 6 and again == 3 * 12 * 2000 + 6  # 16 KB hold 1365; 40 values need three reads of 16


def test_chunks_beyond_the_scratchpad_need_more_passes() -> None:
    assert merge_passes(np.array([0, 1, 128, 129, 128**2, 128**2 + 1]), MACHINE).tolist() == [1, 1, 1, 2, 2, 3]


def test_area_and_power_of_the_abstract() -> None:
    assert MACHINE.area is not None and MACHINE.area * MACHINE.copies == pytest.approx(87, rel=0.01)
    result = simulate_product(MACHINE, uniform(500, 0.01))
    energy = result.energy("activity")
    assert energy is not None and energy.total / result.seconds == pytest.approx(24, rel=0.01)


def test_workloads_of_another_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="computes 'spgemm', not 'attention'"):
        simulate(MACHINE, synthetic_trace("uniform", 0.5, heads=1, tokens=8))
    with pytest.raises(UsageError, match="computes 'attention', not 'spgemm'"):
        simulate_product(find_machine("elsa"), uniform(20, 0.1))


@pytest.mark.parametrize("form", ["coo", "csc", "csr", "lil"])
def test_products_are_equal_in_all_scipy_formats(form: str) -> None:
    matrix = sparse.random_array((30, 30), density=0.1, rng=np.random.default_rng(0), format="csr")
    twice = sparse.coo_array((np.ones(4), ([0, 0, 5, 5], [3, 3, 2, 9])), shape=(30, 30))
    matrix = sparse.csr_array(matrix + twice)
    expected, converted = SpgemmProduct("a", matrix, matrix), matrix.asformat(form)
    if form == "coo":  # with duplicate entries
        halves, places = converted.data / 2, np.stack(converted.coords)
        converted = sparse.coo_array((np.tile(halves, 2), np.tile(places, 2)), (30, 30))
    result, entries = SpgemmProduct("a", converted, converted), converted.nnz
    machine = find_machine("outerspace")
    assert result.multiplies == expected.multiplies and converted.nnz == entries
    assert traffic(result, machine) == traffic(expected, machine)
    assert simulate_product(machine, result).cycles == simulate_product(machine, expected).cycles


def test_matrix_files_round_trip(tmp_path: Path) -> None:
    matrix = sparse.random_array((30, 20), density=0.2, rng=np.random.default_rng(1))
    io.mmwrite(tmp_path / "m.mtx", matrix)
    product = read_matrix(tmp_path / "m.mtx")
    assert product.a.shape == (30, 20) and product.b.shape == (20, 30)
    assert np.allclose(product.a.toarray(), matrix.toarray(), atol=1e-9)


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    whole = tmp_path / "m.mtx"
    io.mmwrite(whole, sparse.random_array((30, 30), density=0.2, rng=np.random.default_rng(1)))
    lines = whole.read_text().splitlines(keepends=True)
    (tmp_path / "cut.mtx").write_text("".join(lines[:-5]))
    (tmp_path / "head.mtx").write_text(lines[0])
    (tmp_path / "other.mtx").write_text("rows,columns\n1,2\n")
    (tmp_path / "nan.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 nan\n")
    (tmp_path / "empty.mtx").write_text("")
    for name in ("cut", "head", "other", "nan", "empty"):
        with pytest.raises(IntegrityError):
            read_matrix(tmp_path / f"{name}.mtx")
    with pytest.raises(UsageError, match="there is no matrix"):
        read_matrix(tmp_path / "none.mtx")
    (tmp_path / "huge.mtx").write_text("%%MatrixMarket matrix coordinate real general\n4 4 99999999999999\n1 1 1\n")
    with pytest.raises(IntegrityError, match="truncated: 99999999999999 values in"):
        read_matrix(tmp_path / "huge.mtx")
    (tmp_path / "huge.mtx").write_text("%%MatrixMarket matrix coordinate real general\n99999999999 4 1\n1 1 1\n")
    with pytest.raises(UsageError, match="99999999999 rows, 4 columns"):
        read_matrix(tmp_path / "huge.mtx")
    with gzip.open(tmp_path / "huge.mtx.gz", "wt") as file:
        file.write("%%MatrixMarket matrix coordinate real general\n4 4 99999999999999\n1 1 1\n")
    with pytest.raises(UsageError, match="99999999999999 values"):
        read_matrix(tmp_path / "huge.mtx.gz")
    with pytest.raises(UsageError, match="exceed the limit"):
        uniform(10**8, 0.01)
    (tmp_path / "zero.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 0\n")
    with pytest.raises(UsageError, match="no nonzero values"):
        read_matrix(tmp_path / "zero.mtx")


def test_symmetric_and_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "half.mtx").write_text("%%MatrixMarket matrix array integer symmetric\n40 40\n" + "1\n" * 820)
    assert read_matrix(tmp_path / "half.mtx").a.nnz == 1600
    with gzip.open(tmp_path / "ones.mtx.gz", "wt") as file:
        file.write("%%MatrixMarket matrix coordinate pattern general\n99 99 999\n" + "1 1\n" * 999)
    assert (tmp_path / "ones.mtx.gz").stat().st_size < 2 * 999
    assert read_matrix(tmp_path / "ones.mtx.gz").a.nnz == 1


def test_measured_products() -> None:
    small, large = measured(uniform(200, 0.05), times=1), measured(uniform(2000, 0.001), times=1)
    assert small["gustavson"] and small["dense"] and large["dense"] is None
    with pytest.raises(UsageError, match="cannot be multiplied"):
        SpgemmProduct("p", sparse.csr_array(np.ones((2, 3))), sparse.csr_array(np.ones((2, 3))))
    with pytest.raises(UsageError, match="no matrix"):
        uniform(10, 0.0)


@pytest.mark.slow
def test_twice_the_tiles_take_half_the_time(products: dict) -> None:
    began = time.process_time()
    times = [simulate_product(replace(MACHINE, copies=count), products[79_730]).seconds for count in (16, 32)]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.1)
    assert time.process_time() - began < 10
