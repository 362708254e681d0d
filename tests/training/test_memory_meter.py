"""The size of the process is reported in addition to its tensors."""

import re
import sys
from pathlib import Path

import psutil
import pytest
import tiny_recipes
import torch
from click.testing import CliRunner
from tiny_runs import plain_run, technique

from thrifty.cli.explain import command
from thrifty.composition.compose import compose
from thrifty.interface.run_endings import ending
from thrifty.memory.disk_tier import DiskTier
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.key_figures import key_figures
from thrifty.reporting.run_record import read_run
from thrifty.reporting.run_tables import tiles
from thrifty.training.memory_meter import MemoryMeter, kept_bytes
from thrifty.training.trainer import train

SIZE = r"([\d.]+ [kMG]B)"


def bytes_of(size: str) -> float:
    """Return the bytes of a printed size, such as "1.2 GB"."""
    number, unit = size.split()
    return float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_memory_is_predicted_and_measured_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(tiny_recipes.text(tmp_path), tmp_path)
    shown = rf"memory {SIZE} \(predicted peak {SIZE}\)"
    now, predicted = map(bytes_of, re.findall(shown, capsys.readouterr().err)[-1])
    ended = re.search(rf"memory at the peak {SIZE}, predicted {SIZE}", "\n".join(ending(summary)))
    assert ended and bytes_of(ended[2]) == predicted
    peak = summary["process_memory"] + summary["peak_memory"]
    assert bytes_of(ended[1]) == pytest.approx(peak, rel=0.005) and 0.5 * peak < now <= 1.005 * peak
    assert 0.5 < predicted / peak < 1.5


def test_process_memory_is_in_summary_and_report(tmp_path: Path) -> None:
    summary = train(tiny_recipes.text(tmp_path), tmp_path, quiet=True)
    whole = summary["process_memory"] + summary["peak_memory"]
    assert whole > 2e8 and abs(whole / psutil.Process().memory_info().rss - 1) < 0.3
    key = key_figures(read_run(tmp_path / "text"))
    assert key.peak_memory == whole
    predicted = [summary[f"{part}_memory"] for part in ("process", "predicted", "kept")]
    assert key.predicted_memory == sum(predicted)
    ((peak, remark),) = ((value, remark) for label, value, remark in tiles(key) if label == "Peak memory")
    assert bytes_of(peak) == pytest.approx(whole, rel=0.005)
    assert re.fullmatch(rf"predicted {SIZE}, [\d.]+ % too (low|high)", remark)


def test_explain_prints_process_memory(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(write_recipe(tiny_recipes.text(tmp_path)))
    output = CliRunner().invoke(command, [str(file)], catch_exceptions=False).stdout
    match = re.search(
        rf"predicted memory at the peak {SIZE}: {SIZE} of the process before the model is built, "
        rf"{SIZE} of tensors, {SIZE} of kernels and freed blocks\ntensors: parameters ",
        output,
    )
    assert match
    whole, *places = map(bytes_of, match.groups())
    assert whole == pytest.approx(sum(places), rel=0.01)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ([], 60e6 + 0.4 * 1e9),
        (["memory.recompute"], 60e6 + 0.4 * 1e9),
        (["compile"], 60e6),
        (["memory.activation_budget"], 60e6),
    ],
)
def test_freed_memory_that_a_process_keeps_is_predicted(names: list[str], kept: float) -> None:
    techniques = [technique(name, bytes=0.5) if "budget" in name else technique(name) for name in names]
    run = compose(plain_run(), [*techniques, technique("optimizers.adamw")], 10)
    assert kept_bytes(run.device, run.techniques, 1e9) == pytest.approx(kept)
    assert kept_bytes(torch.device("cuda"), run.techniques, 1e9) == 0
    assert kept_bytes(run.device, run.techniques, 1e6) <= 1.4e6


def test_peak_excludes_memory_from_before_the_run() -> None:
    before = torch.ones(2**24)
    meter = MemoryMeter(torch.device("cpu"))
    assert meter.process > before.nbytes
    after = torch.ones(2**24)
    assert after.nbytes * 0.9 < meter.peak() < after.nbytes * 1.5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells pages of files apart")
def test_pages_of_mapped_files_are_not_counted(tmp_path: Path) -> None:
    meter = MemoryMeter(torch.device("cpu"))
    offloaded = DiskTier(str(tmp_path)).allocate([torch.ones(2**24)])[0]
    assert meter.now() < offloaded.nbytes / 2
