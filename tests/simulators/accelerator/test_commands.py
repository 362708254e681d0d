"""`thrifty simulate attention` compares designs on one trace with equal resources. `gemm` reads SCALE-Sim files."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.io import mmwrite
from scipy.sparse import random_array

from thrifty.cli.simulate import command
from thrifty.core.errors import UsageError
from thrifty.interface.design_comparison import format_joules
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace
from thrifty.simulators.accelerator.trace_file import save_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.safetensors"
    save_trace(synthetic_trace("runs", 0.25, layers=2, heads=2, tokens=64), path)
    return path


def printed(*words: object) -> str:
    result = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def printed_json(*words: object) -> dict[str, Any]:
    return json.loads(printed(*words, "--json"))


def test_designs_under_equal_resources(trace: Path) -> None:
    iso = "multipliers=128,clock=1e9,bandwidth=64e9"
    words = (
        "attention",
        "--designs",
        "elsa,elsa:approximate=0,a3,dense",
        "--trace",
        trace,
        "--equal-resources",
        iso,
        "--no-measure",
    )
    page, result = printed(*words), printed_json(*words)
    assert result["budget"] == {"multipliers": 128, "clock": 1e9, "bandwidth": 64e9}
    rows = {row["machine"]: row for row in result["results"]}
    assert list(rows) == ["elsa", "elsa:approximate=0", "a3", "dense"]
    assert all(row["multipliers"] == 128 for row in rows.values())
    assert rows["elsa"]["cycles"] < rows["elsa:approximate=0"]["cycles"]
    assert rows["dense"]["energy_by_activity"] is None and rows["a3"]["energies"][1]["table"] == "horowitz-45nm"
    for row in rows.values():
        assert row["machine"] in page and f"{row['cycles']:,}" in page
    for word in ("starved", "blocked", "utilization", "sorting the keys", "horowitz-45nm"):
        assert word in page


def test_all_tables_files_and_timelines(trace: Path, tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "csv", "--perfetto", tmp_path / "p.json")
    page = printed("attention", "--designs", "elsa", "--trace", trace, "--energy-table", "all", *files,
                   "--engine", "event", "--no-measure")  # fmt: skip
    assert "aladdin-45nm" in page and "horowitz-45nm, high" in page
    assert "elsa_COMPUTE_REPORT.csv" in {path.name for path in (tmp_path / "csv").iterdir()}
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert "has no energy for sram" in printed(
        "attention", "--designs", "elsa", "--trace", trace, "--energy-table", "aladdin-45nm", "--no-measure"
    )


@pytest.mark.parametrize(
    ("designs", "iso", "message"),
    [
        ("elza", "clock=1e9", "did you mean 'elsa'"),
        ("elsa:selector=4", "clock=1e9", "did you mean 'selectors'"),
        ("elsa:selectors", "clock=1e9", "is not KEY=VALUE"),
        ("elsa", "multiplier=4", "did you mean 'multipliers'"),
        ("elsa", "bandwidth=-64e9", "is not a number above zero"),
        ("elsa", "multipliers=1.5", "is not a whole number above zero"),
        ("elsa", "multipliers=100", "at least 128"),
        (",", "clock=1e9", "the list of designs is empty"),
        ("elsa,dense,elsa", "clock=1e9", "'elsa' is named twice"),
        ("elsa", "clock=inf", "clock is inf.*\n.*finite"),
        ("elsa", "bandwidth=1e-300", "bandwidth is 1e-300.*\n.*at least 1"),
        ("elsa", "multipliers=1e30", "copies has 91 bits"),
        ("outerspace", "clock=1e9", "computes 'spgemm', not 'attention'"),
    ],
)
def test_invalid_designs_and_budgets_are_refused(designs: str, iso: str, message: str, trace: Path) -> None:
    with pytest.raises(UsageError, match=message):
        printed("attention", "--designs", designs, "--trace", trace, "--equal-resources", iso)


def recorded(path: Path) -> Path:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 2, 32, 16)).astype(np.float32) for _ in range(3))
    save_trace(AttentionTrace("r", (layer_of("l", q=q, k=k, v=v),)), path)
    return path


def test_measured_times_have_their_own_columns(trace: Path) -> None:
    words = ("attention", "--designs", "elsa,dense", "--trace", trace)
    page, result = printed(*words), printed_json(*words)
    (name, seconds), *_ = result["measured_here"].items()
    assert name.startswith("processor") and seconds > 0 and f"here, all pairs, {name}" in page
    assert all(row["measured_here"]["kept_pairs"] > 0 for row in result["results"]) and "here, its pairs" in page
    assert printed_json(*words, "--no-measure")["measured_here"] == {}


def test_masks_of_several_filters_at_equal_error(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.safetensors")
    words = ("attention", "--designs", "elsa,dense", "--trace", path, "--filter", "exact", "--filter", "own",
             "--max-error", "0.2", "--no-measure")  # fmt: skip
    page, result = printed(*words), printed_json(*words)
    rows = {row["machine"]: row for row in result["results"]}
    assert list(rows) == ["elsa, exact", "dense, exact", "elsa, own", "dense, own"] and all(
        name in page for name in rows
    )
    exact, own = (rows[f"elsa, {name}"]["masks"] for name in ("exact", "own"))
    assert exact["density"] < own["density"] < 1 and float(own["output error"]) <= 0.2
    assert rows["dense, own"]["masks"]["density"] == rows["dense, exact"]["masks"]["density"] == 1  # all pairs
    assert rows["elsa, exact"]["filter"] == "exact" and rows["elsa, exact"]["held_out_loss"] is None
    with pytest.raises(UsageError, match=r"not in \(0, 1\)"):
        printed(*words[:-2], "1.5")
    with pytest.raises(UsageError, match="not to 'mine'"):
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "recipe.toml").write_text("")
        printed("attention", "--designs", "elsa", "--trace", path, "--run", tmp_path / "runs" / "mine")


def test_filters_do_not_affect_machines_that_compute_all_pairs(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.safetensors")
    words = ("attention", "--designs", "elsa,elsa:approximate=0,a3:approximate=0,dota:approximate=0", "--trace", path)
    result = printed_json(*words, "--filter", "own", "--density", "0.2", "--no-measure")
    (approximate, *others) = [row["masks"] for row in result["results"]]
    assert approximate["density"] < 0.3 and float(approximate["output error"]) > 0
    assert all(masks == {"density": 1.0} for masks in others)


def test_a_filter_that_misses_the_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thrifty.simulators.accelerator.design_filters.LONGEST", 0.5)
    words = ("attention", "--designs", "a3,sanger", "--trace", recorded(tmp_path / "r.safetensors"), "--filter", "own")
    page = printed(*words, "--max-error", "0.001", "--no-measure")
    assert "a3: no threshold of its filter keeps the error below 0.001" in page and "sanger: no" not in page
    assert "from the evaluated examples" in page


def test_own_filters_and_factors_of_a_speed_ratio(tmp_path: Path) -> None:
    recorded(tmp_path / "r.safetensors")
    words = ("attention", "--designs", "sanger,dota,dense", "--trace", tmp_path / "r.safetensors", "--filter", "own",
             "--no-measure", "--density", "0.25", "--baseline-design", "dense")  # fmt: skip
    page, result = printed(*words), printed_json(*words)
    assert [row["masks"].get("filter") for row in result["results"]] == ["sanger", "dota", None]
    assert [round(row["masks"]["density"], 2) for row in result["results"]] == [0.25, 0.25, 1.0]
    for word in ("softmax kept", "fewer operations", "of dense", "recalled, not checked"):
        assert word in page
    with pytest.raises(UsageError, match="did you mean 'sanger'"):
        printed(*words[:-1], "sangar")


def test_sparse_products_with_measured_times(tmp_path: Path) -> None:
    page, result = (
        printed("spgemm", "--size", 300, "--density", 0.02),
        printed_json("spgemm", "--size", 300, "--density", 0.02),
    )
    row = result["products"][0]
    assert row["measured_here"]["gustavson"] > 0 and row["measured_here"]["dense"] > 0
    assert row["multiplies"] - row["adds"] == row["found"] and set(row["traffic"]) == {"A", "B", "T", "Z"}
    for word in ("here, Gustavson", "here, dense", "simulated", "relative to the minimum", "recalled"):
        assert word in page
    mmwrite(tmp_path / "m.mtx", random_array((20, 20), density=0.2, rng=np.random.default_rng(0)))
    result = printed_json("spgemm", tmp_path / "m.mtx", "--no-measure", "--designs", "outerspace,outerspace:copies=8")
    assert [row["copies"] for row in result["products"]] == [16, 8] and result["products"][0]["matrix"] == "m"
    with pytest.raises(UsageError, match="the list of designs is empty"):
        printed("spgemm", "--designs", ",")


def test_gemm_of_a_topology(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("Layer,M,N,K,\nscores,512,512,64,\nvalues,512,64,512,\n")
    assert "32,255" in printed("gemm", tmp_path / "t.csv")
    (tmp_path / "a.cfg").write_text("[architecture_presets]\nArrayHeight: 8\nArrayWidth: 4\nDataflow: is\n")
    result = printed_json("gemm", tmp_path / "t.csv", "--cfg", tmp_path / "a.cfg")
    assert [row["Total Cycles"] for row in result["layers"]] == [542719, 671743]
    printed("gemm", tmp_path / "t.csv", "--csv", tmp_path / "csv")
    with (tmp_path / "csv" / "COMPUTE_REPORT.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["LayerID"], row["Total Cycles"]) for row in rows] == [("0", "32255"), ("1", "18367")]


def test_joules_are_written_with_a_prefix() -> None:
    printed = [format_joules(energy) for energy in (None, 2.5, 3.87e-3, 4e-6, 5e-10)]
    assert printed == ["–", "2.50 J", "3.87 mJ", "4.00 µJ", "0.500 nJ"]
