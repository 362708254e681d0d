"""The table of break-even densities of sparse products."""

from pathlib import Path

import pytest

from thrifty.kernels.sparse import sparse_breakeven
from thrifty.planning.breakeven_table import BreakevenRow, crossover_table


@pytest.mark.usefixtures("measured_products")
def test_rows_are_measured_once_for_each_form_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    monkeypatch.setattr(sparse_breakeven.measure, "__defaults__", (0.0,))  # as short as can be
    sparse_breakeven._stored.cache_clear()
    rows = list(crossover_table([(32, 48), (10, 7)], tokens=16, dtypes=("float32", "bfloat16")))
    assert [row.case.form for row in rows] == ["csr", "blocks", "csr", "blocks", "csr", "csr"]
    assert len(list((tmp_path / "sparse-products").iterdir())) == 6
    monkeypatch.setattr(sparse_breakeven, "measure", lambda case: pytest.fail("measured again"))
    assert list(crossover_table([(32, 48)], tokens=16)) == rows[:2]


def test_rows_print_the_breakeven_density() -> None:
    row = BreakevenRow(
        sparse_breakeven.BreakevenCase("blocks", 64, 32, 16), sparse_breakeven.DensityTimeFit(1.0, 0.1, 1.2)
    )
    assert row.crossover == pytest.approx(0.75)
    assert str(row).startswith(
        "64 x 32, float32, blocks of 16: faster below a density of 0.75; time relative to dense: 0.70 at 0.5"
    )
