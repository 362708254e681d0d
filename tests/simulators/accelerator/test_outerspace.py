"""OuterSPACE (Pal et al., HPCA 2018): counts, traffic and time of uniform random matrices.

Published times are digitised from the paper's figure (graded R), for matrices of the same sizes and densities. Traffic
is that of TeAAL's model (MICRO 2023), from the results it released.
"""

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
    # rows: density, milliseconds of the paper; TeAAL's products, and its bytes of A, B, T and Z
    4_986: (8e-3, 7.608, 7_975_976, (2_422_928, 2_422_968, 193_058_712, 81_874_864)),
    9_987: (2e-3, 3.652, 3_984_096, (2_453_160, 2_453_008, 2 * 48_646_856, 46_887_608)),
    19_937: (5e-4, 2.530, 1_987_858, (2_507_896, 2_507_632, 49_460_072, 23_833_992)),
    39_888: (1.3e-4, 1.791, 1_072_202, (2_721_936, 2_707_496, 27_696_728, 12_941_600)),
    79_730: (3.1e-5, 1.715, 488_667, (2_844_400, 2_633_688, 13_811_848, 6_009_584)),
}
"""The second row's T is released as 48,646,856, which is one way only of what the other four count both ways."""


@pytest.fixture(scope="module")
def products() -> dict[int, SpgemmProduct]:
    return {size: uniform(size, row[0]) for size, row in PUBLISHED.items()}


@pytest.mark.parametrize("size", PUBLISHED)
def test_time_is_within_30_percent_of_the_paper_without_a_fitted_number(size: int, products: dict) -> None:
    found = simulate_product(MACHINE, products[size])
    assert found.seconds * 1e3 == pytest.approx(PUBLISHED[size][1], rel=0.3)
    at_bandwidth = sum(traffic(products[size], MACHINE).values()) / 128e9
    assert PUBLISHED[size][1] / 1e3 > 3 * at_bandwidth  # which alone is three to nine times too fast
    assert found.seconds > 3 * at_bandwidth


@pytest.mark.parametrize("size", PUBLISHED)
def test_traffic_is_within_5_percent_of_teaals_operand_by_operand(size: int, products: dict) -> None:
    _, _, multiplies, sizes = PUBLISHED[size]
    found = traffic(products[size], MACHINE)
    assert products[size].multiplies == pytest.approx(multiplies, rel=0.02)  # other random numbers
    for ours, theirs in zip(found.values(), sizes, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    least = [sum(moved) / (moved[0] + moved[1] + moved[3]) for moved in (tuple(found.values()), sizes)]
    assert least[0] == pytest.approx(least[1], rel=0.05)


matrices = st.builds(
    lambda seed, m, k, n, density: SpgemmProduct(
        "drawn",
        *(
            sparse.csr_array((np.random.default_rng(seed + part).random(shape) < density) + corner(shape))
            for part, shape in enumerate(((m, k), (k, n)))
        ),
    ),
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 0.9),
)  # fmt: skip


def corner(shape: tuple[int, int]) -> np.ndarray:
    """One number, so that no matrix is empty."""
    return np.pad(np.ones((1, 1)), ((0, shape[0] - 1), (0, shape[1] - 1)))


@given(matrices)
@settings(max_examples=40, deadline=None)
def test_products_sums_and_chunks_are_those_of_plain_loops(product: SpgemmProduct) -> None:
    a, b = product.a.toarray(), product.b.toarray()
    multiplies, places, chunks = 0, set(), set()
    for i, k in zip(*np.nonzero(a), strict=True):
        for j in np.flatnonzero(b[k]):
            multiplies += 1
            places.add((int(i), int(j)))
            chunks.add((int(i), int(k)))
    assert product.multiplies == multiplies == product.partial.sum()
    assert product.adds == multiplies - len(places) and product.found.sum() == len(places)
    assert product.chunks.sum() == len(chunks)
    found = simulate_product(MACHINE, product)
    assert found.layers[0].macs == multiplies and found.cycles >= sum(layer.bound for layer in found.layers) > 0
    assert sum(l.read + l.written for l in found.layers) == pytest.approx(  # noqa: E741
        sum(traffic(product, MACHINE).values())
    )


def test_both_phases_by_hand() -> None:
    """One number times a row of three: dealt (150 cycles), fetched (150) and multiplied (3); merged a number at a time,
    one head, after the list's own (150 · 4 + 3 · 1); moved at 16 / 3 bytes a cycle."""
    product = SpgemmProduct("one", sparse.csr_array(np.array([[2.0]])), sparse.csr_array(np.array([[1.0, 2.0, 3.0]])))
    multiply, merge = simulate_product(MACHINE, product).layers
    moved = 12 + (12 * 3 + 6) + (12 * 3 + 4)
    assert multiply.cycles == 150 + 153 + int(np.ceil(moved * 3 / 16))
    assert merge.cycles == 150 * 4 + 3 + int(np.ceil((12 * 3 + 4 + 4 + 12 * 3 + 4) * 3 / 16))


def test_time_follows_latency_and_hardly_bandwidth(products: dict) -> None:
    product = products[9_987]
    plain = simulate_product(MACHINE, product)
    near = simulate_product(MACHINE.replaced("memories.dram.latency", 5e-8), product)
    wide = simulate_product(limit_resources(MACHINE, bandwidth=32e9), product)
    assert near.cycles < 0.6 * plain.cycles and wide.cycles > 0.9 * plain.cycles
    assert near.seconds * 1e3 < 0.7 * PUBLISHED[9_987][1]


def test_a_column_that_a_cache_does_not_hold_comes_in_again() -> None:
    a = sparse.csr_array(np.ones((40, 1)))
    short, long = (SpgemmProduct("p", a, sparse.csr_array(np.ones((1, n)))) for n in (1000, 2000))
    once, again = (traffic(product, MACHINE)["B"] for product in (short, long))
    assert once == 12 * 1000 + 6 and again == 3 * 12 * 2000 + 6  # 16 KB hold 1365; 40 numbers are three times 16


def test_more_chunks_than_a_scratchpad_holds_take_another_pass() -> None:
    assert merge_passes(np.array([0, 1, 128, 129, 128**2, 128**2 + 1]), MACHINE).tolist() == [1, 1, 1, 2, 2, 3]


def test_area_and_power_are_those_of_the_abstract() -> None:
    assert MACHINE.area is not None and MACHINE.area * MACHINE.copies == pytest.approx(87, rel=0.01)
    found = simulate_product(MACHINE, uniform(500, 0.01))
    energy = found.energy("activity")
    assert energy is not None and energy.total / found.seconds == pytest.approx(24, rel=0.01)


def test_what_is_for_attention_is_not_for_sparse_products_and_the_other_way_round() -> None:
    with pytest.raises(UsageError, match="computes spgemm, not attention"):
        simulate(MACHINE, synthetic_trace("uniform", 0.5, heads=1, tokens=8))
    with pytest.raises(UsageError, match="computes attention, not spgemm"):
        simulate_product(find_machine("elsa"), uniform(20, 0.1))


@pytest.mark.parametrize("form", ["coo", "csc", "csr", "lil"])
def test_a_product_is_the_same_in_all_of_scipys_formats(form: str) -> None:
    drawn = sparse.random_array((30, 30), density=0.1, rng=np.random.default_rng(0), format="csr")
    twice = sparse.coo_array((np.ones(4), ([0, 0, 5, 5], [3, 3, 2, 9])), shape=(30, 30))
    drawn = sparse.csr_array(drawn + twice)
    wanted, given = SpgemmProduct("a", drawn, drawn), drawn.asformat(form)
    if form == "coo":  # with numbers that are to be added up
        halves, places = given.data / 2, np.stack(given.coords)
        given = sparse.coo_array((np.tile(halves, 2), np.tile(places, 2)), (30, 30))
    found, entries = SpgemmProduct("a", given, given), given.nnz
    machine = find_machine("outerspace")
    assert found.multiplies == wanted.multiplies and given.nnz == entries
    assert traffic(found, machine) == traffic(wanted, machine)
    assert simulate_product(machine, found).cycles == simulate_product(machine, wanted).cycles


def test_a_matrix_of_a_file_is_what_was_written(tmp_path: Path) -> None:
    drawn = sparse.random_array((30, 20), density=0.2, rng=np.random.default_rng(1))
    io.mmwrite(tmp_path / "m.mtx", drawn)
    product = read_matrix(tmp_path / "m.mtx")
    assert product.a.shape == (30, 20) and product.b.shape == (20, 30)
    assert np.allclose(product.a.toarray(), drawn.toarray(), atol=1e-9)


def test_a_file_that_is_cut_short_or_none_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(IntegrityError, match="cut short: 99999999999999 numbers in"):
        read_matrix(tmp_path / "huge.mtx")
    (tmp_path / "huge.mtx").write_text("%%MatrixMarket matrix coordinate real general\n99999999999 4 1\n1 1 1\n")
    with pytest.raises(UsageError, match="99999999999 rows, 4 columns"):
        read_matrix(tmp_path / "huge.mtx")
    with gzip.open(tmp_path / "huge.mtx.gz", "wt") as file:
        file.write("%%MatrixMarket matrix coordinate real general\n4 4 99999999999999\n1 1 1\n")
    with pytest.raises(UsageError, match="99999999999999 numbers"):
        read_matrix(tmp_path / "huge.mtx.gz")
    with pytest.raises(UsageError, match="more than can be drawn"):
        uniform(10**8, 0.01)
    (tmp_path / "zero.mtx").write_text("%%MatrixMarket matrix coordinate real general\n2 2 1\n1 1 0\n")
    with pytest.raises(UsageError, match="without a number"):
        read_matrix(tmp_path / "zero.mtx")


def test_files_may_say_less_than_their_numbers_where_symmetric_or_compressed(tmp_path: Path) -> None:
    (tmp_path / "half.mtx").write_text("%%MatrixMarket matrix array integer symmetric\n40 40\n" + "1\n" * 820)
    assert read_matrix(tmp_path / "half.mtx").a.nnz == 1600
    with gzip.open(tmp_path / "ones.mtx.gz", "wt") as file:
        file.write("%%MatrixMarket matrix coordinate pattern general\n99 99 999\n" + "1 1\n" * 999)
    assert (tmp_path / "ones.mtx.gz").stat().st_size < 2 * 999
    assert read_matrix(tmp_path / "ones.mtx.gz").a.nnz == 1


def test_what_is_measured_here_is_the_product() -> None:
    small, large = measured(uniform(200, 0.05), times=1), measured(uniform(2000, 0.001), times=1)
    assert small["gustavson"] and small["dense"] and large["dense"] is None
    with pytest.raises(UsageError, match="is no product"):
        SpgemmProduct("p", sparse.csr_array(np.ones((2, 3))), sparse.csr_array(np.ones((2, 3))))
    with pytest.raises(UsageError, match="no matrix"):
        uniform(10, 0.0)


@pytest.mark.slow
def test_twice_the_tiles_take_half_the_time_and_the_largest_matrix_seconds_to_simulate(products: dict) -> None:
    began = time.process_time()
    times = [simulate_product(replace(MACHINE, copies=count), products[79_730]).seconds for count in (16, 32)]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.1)
    assert time.process_time() - began < 10
