"""`thrifty doctor` tells what is there, what is missing and what to do."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from thrifty.cli.doctor import command
from thrifty.core.errors import UsageError
from thrifty.interface.diagnosis import diagnose
from thrifty.machine.machine_info import CompileTrial, GpuInfo, MachineInfo, probe
from thrifty.machine.measured_rates import MeasuredRate

STEADY = {"float32": MeasuredRate(2e11, 1.9e11, 2.1e11, 5), "bfloat16": MeasuredRate(8e11, 7e11, 9e11, 5)}


@pytest.fixture(scope="module")
def healthy() -> MachineInfo:
    """This machine with everything in place and nobody else on it."""
    return replace(
        probe(quick=True),
        torch="2.11.0+cpu",
        compiler="/usr/bin/g++",
        python_headers=True,
        memory_available=int(16e9),
        disk_free=int(100e9),
        core_quota=None,
        missing_extras={},
        backends=("gloo", "nccl"),
        gpus=(),
        matmul=STEADY,
    )


@pytest.mark.slow
def test_a_healthy_machine_has_no_findings(healthy):
    assert diagnose(healthy, True, CompileTrial(True, 10.0, "")) == []


@pytest.mark.parametrize(
    ("changes", "what", "fix"),
    [
        ({"compiler": None}, "attention.tiled", "apt-get install g++"),
        ({"python_headers": False}, "compile", "python3-dev"),
        ({"matmul": {**STEADY, "bfloat16": STEADY["float32"]}}, "1.00 times", "precision.mixed"),
        ({"matmul": {**STEADY, "float32": MeasuredRate(5e10, 1e10, 2e11, 9)}}, "other programs", "measure again"),
        ({"core_quota": 1.0, "logical_cores": 8}, "allows 1", "OMP_NUM_THREADS=1"),
        ({"disk_free": int(1e9)}, "1.00 GB", "delete files"),
        ({"memory_available": int(1e9)}, "1.00 GB", "smaller preset"),
        ({"missing_extras": {"hub": ("datasets",)}}, "datasets", 'pip install "thrifty[hub]"'),
        ({"backends": ()}, "gloo", "torch wheel"),
        ({"backends": ("gloo",), "gpus": (GpuInfo("a GPU", int(8e9), "8.0", STEADY),)}, "NCCL", "CUDA"),
    ],
)
def test_missing_parts_are_named_with_fixes_and_do_not_stop(healthy, changes, what, fix):
    (finding,) = diagnose(replace(healthy, **changes), True, None)
    assert what in finding.what and fix in finding.fix and not finding.fatal


def test_impossible_training_is_fatal(healthy):
    (old,) = diagnose(replace(healthy, torch="2.4.1"), True, None)
    (locked,) = diagnose(healthy, False, None)
    assert old.fatal and "2.11" in old.fix and locked.fatal


def test_a_compiler_that_does_not_work_is_found_by_trying(healthy):
    (finding,) = diagnose(healthy, True, CompileTrial(False, 3.0, "ld: cannot find -lgomp"))
    assert "cannot find -lgomp" in finding.what and "--without compile" in finding.fix


def test_json_is_one_document_with_the_same_facts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["--quick", "--json"])
    document = json.loads(result.stdout)
    assert result.exit_code == 0 and set(document) == {"machine", "compile", "findings", "sparse"}
    assert document["machine"]["matmul"]["float32"]["median"] > 0 and document["compile"] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_names_the_measured_rates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["--quick"])
    assert result.exit_code == 0
    for words in ("float32 matmul", "FLOP/s", "C++ compiler", "physical", "disk here"):
        assert words in result.stdout


@pytest.mark.slow
def test_exit_code_is_1_where_no_run_folder_can_be_made(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file where the folder should be")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(command, ["--quick"])
    assert result.exit_code == 1 and "cannot train" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("measured_products")
def test_it_tells_from_which_density_on_sparse_products_pay(tmp_path, monkeypatch):
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    done = CliRunner().invoke(command, ["--quick", "--json", "--sparse", "32x48"])
    rows = json.loads(done.stdout)["sparse"]
    assert [(row["case"]["form"], row["case"]["dtype"]) for row in rows] == [
        ("csr", "float32"), ("blocks", "float32"), ("csr", "bfloat16"), ("blocks", "bfloat16"),
    ]  # fmt: skip
    assert all(0 <= row["crossover"] <= 1 and row["line"]["dense"] > 0 for row in rows)


@pytest.mark.parametrize("shape", ["32", "32x", "0x4", "32x48x2"])
def test_invalid_shapes_are_refused(shape):
    done = CliRunner().invoke(command, ["--quick", "--sparse", shape])
    assert isinstance(done.exception, UsageError) and f"sparse {shape!r} is not a weight shape" in done.exception.what
