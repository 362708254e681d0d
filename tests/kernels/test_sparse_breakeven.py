"""Break-even density of sparse products: the line through measured times, and its cache."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.kernels.sparse import sparse_breakeven
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase, DensityTimeFit, best_form, measure

pytestmark = pytest.mark.usefixtures("measured_products")
CASE = BreakevenCase("csr", 64, 48, 32)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "__defaults__", (0.0,))  # as short as possible
    sparse_breakeven._stored.cache_clear()
    return tmp_path / "sparse-products"


def test_crossover_is_where_sparse_and_dense_times_are_equal() -> None:
    line = DensityTimeFit(dense=2.0, fixed=0.5, rate=5.0)
    assert line.crossover == pytest.approx(0.3) and line.ratio(0.3) == pytest.approx(1.0)
    assert line.ratio(0.1) == pytest.approx(0.5)
    assert DensityTimeFit(1.0, 2.0, 5.0).crossover == 0.0 and DensityTimeFit(1.0, 0.0, 0.5).crossover == 1.0


def test_fastest_form_is_chosen() -> None:
    lines = {"csr": DensityTimeFit(1.0, 0.0, 2.5), "blocks": DensityTimeFit(1.0, 0.0, 1.2)}
    assert best_form(lines, {"csr": 0.1, "blocks": 0.9})[0] == "csr"  # type: ignore[arg-type]
    form, ratio = best_form(lines, {"csr": 0.1, "blocks": 0.1})  # type: ignore[arg-type]
    assert form == "blocks" and ratio == pytest.approx(0.12)
    assert best_form(lines, {"csr": 0.2}) == ("csr", 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["csr", "blocks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_timed_at_two_densities(form: str, dtype: str) -> None:
    line = measure(replace(CASE, form=form, dtype=dtype), seconds=0.01)  # type: ignore[arg-type]
    assert line.dense > 0 and line.fixed >= 0 and line.rate >= 0 and line.fixed + line.rate > 0


def test_line_passes_through_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_breakeven, "_best", lambda candidates, seconds: [10.0, 1.5, 3.0])
    shapes = BreakevenCase("csr", 200, 100, 32)
    line = measure(shapes)
    assert line.ratio(0.02) == pytest.approx(0.15, rel=0.1) and line.ratio(0.2) == pytest.approx(0.3, rel=0.1)


def test_measurement_is_stored_and_reused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CASE.measured()
    (file,) = cache.iterdir()
    monkeypatch.setattr(sparse_breakeven, "measure", lambda case: pytest.fail("measured again"))
    sparse_breakeven._stored.cache_clear()
    assert CASE.measured() == first
    assert json.loads(file.read_text())["case"]["outputs"] == 64


def test_measurement_stored_first_by_another_process_counts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(case: BreakevenCase) -> DensityTimeFit:
        sparse_breakeven._store(
            sparse_breakeven._path(case, torch.get_num_threads()), case, DensityTimeFit(1.0, 0.25, 0.5)
        )
        return DensityTimeFit(9.0, 9.0, 9.0)

    monkeypatch.setattr(sparse_breakeven, "measure", meanwhile)
    assert CASE.measured() == DensityTimeFit(1.0, 0.25, 0.5)
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.parametrize("text", ["", "{}", '{"dense": 0, "fixed": 1, "rate": 1}', "[1]"])
def test_damaged_file_is_measured_again(cache: Path, text: str) -> None:
    path = sparse_breakeven._path(CASE, torch.get_num_threads())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    line = CASE.measured()
    assert sparse_breakeven._read(path) == line and line.dense > 0


def test_unwritable_cache_is_not_required(cache: Path) -> None:
    cache.write_text("a file in its place")
    assert CASE.measured().dense > 0


def test_machines_threads_and_dtypes_have_separate_files(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        sparse_breakeven._path(CASE, 1),
        sparse_breakeven._path(CASE, 2),
        sparse_breakeven._path(replace(CASE, dtype="bfloat16"), 1),
    }
    monkeypatch.setattr(sparse_breakeven, "fingerprint", lambda device: {"device_name": "another"})
    assert len(paths | {sparse_breakeven._path(CASE, 1)}) == 4


def test_measurement_runs_under_fake_tensor_mode(cache: Path) -> None:
    with FakeTensorMode():
        assert CASE.measured().dense > 0
