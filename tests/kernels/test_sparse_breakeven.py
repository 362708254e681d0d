"""From which density on sparse products win: the line through measured times, and how it is kept."""

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
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "__defaults__", (0.0,))  # as short as can be
    sparse_breakeven._kept.cache_clear()
    return tmp_path / "sparse-products"


def test_a_line_meets_the_time_of_dense_products_at_the_crossover() -> None:
    line = DensityTimeFit(dense=2.0, fixed=0.5, rate=5.0)
    assert line.crossover == pytest.approx(0.3) and line.ratio(0.3) == pytest.approx(1.0)
    assert line.ratio(0.1) == pytest.approx(0.5)
    assert DensityTimeFit(1.0, 2.0, 5.0).crossover == 0.0 and DensityTimeFit(1.0, 0.0, 0.5).crossover == 1.0


def test_the_form_that_takes_the_least_time_is_chosen() -> None:
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


def test_the_line_goes_through_the_times_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_breakeven, "_best", lambda ways, seconds: [10.0, 1.5, 3.0])
    shapes = BreakevenCase("csr", 200, 100, 32)
    line = measure(shapes)
    assert line.ratio(0.02) == pytest.approx(0.15, rel=0.1) and line.ratio(0.2) == pytest.approx(0.3, rel=0.1)


def test_what_was_measured_is_kept_and_read_again(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CASE.measured()
    (file,) = kept.iterdir()
    monkeypatch.setattr(sparse_breakeven, "measure", lambda case: pytest.fail("measured again"))
    sparse_breakeven._kept.cache_clear()
    assert CASE.measured() == first
    assert json.loads(file.read_text())["case"]["outputs"] == 64


def test_what_another_process_kept_meanwhile_counts(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(case: BreakevenCase) -> DensityTimeFit:
        sparse_breakeven._keep(
            sparse_breakeven._path(case, torch.get_num_threads()), case, DensityTimeFit(1.0, 0.25, 0.5)
        )
        return DensityTimeFit(9.0, 9.0, 9.0)

    monkeypatch.setattr(sparse_breakeven, "measure", meanwhile)
    assert CASE.measured() == DensityTimeFit(1.0, 0.25, 0.5)
    assert [path.suffix for path in kept.iterdir()] == [".json"]


@pytest.mark.parametrize("text", ["", "{}", '{"dense": 0, "fixed": 1, "rate": 1}', "[1]"])
def test_a_damaged_file_is_measured_anew(kept: Path, text: str) -> None:
    path = sparse_breakeven._path(CASE, torch.get_num_threads())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    line = CASE.measured()
    assert sparse_breakeven._read(path) == line and line.dense > 0


def test_a_folder_that_cannot_be_written_to_is_done_without(kept: Path) -> None:
    kept.write_text("a file in its place")
    assert CASE.measured().dense > 0


def test_other_machines_threads_and_dtypes_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {
        sparse_breakeven._path(CASE, 1),
        sparse_breakeven._path(CASE, 2),
        sparse_breakeven._path(replace(CASE, dtype="bfloat16"), 1),
    }
    monkeypatch.setattr(sparse_breakeven, "fingerprint", lambda device: {"device_name": "another"})
    assert len(paths | {sparse_breakeven._path(CASE, 1)}) == 4


def test_it_is_measured_for_real_among_fake_tensors(kept: Path) -> None:
    with FakeTensorMode():
        assert CASE.measured().dense > 0
