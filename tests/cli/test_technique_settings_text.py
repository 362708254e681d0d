"""What is told at the end of a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from thrifty.cli.verb_output import print_summary


def summary(folder: Path, techniques: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "recipe.toml").write_text(f"[data]\nbatch = 8\n{techniques}")
    records = [{"kind": "step", "step": step, "notes": {"noise_scale": 50.0 * step}} for step in (1, 2)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = {"held_out_loss": 3.0, "unigram_entropy": 5.0, "bytes_per_token": 3.0}
    return {"folder": str(folder), "status": "finished", "steps": 2, "seconds": 1.0, **figures}


def test_a_run_that_measured_its_noise_scale_ends_with_where_larger_batches_stop_paying(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = '[[techniques]]\nname = "measure.noise_scale"\n'
    print_summary(summary(tmp_path / "measured", measured), as_json=False, quiet=False)
    *_, advice, last = capsys.readouterr().out.splitlines()
    assert advice == "gradient noise scale 100 examples (this batch: 8): batches well above it buy little"
    assert last.startswith("run folder")


def test_a_run_that_did_not_measure_says_nothing_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary(tmp_path / "plain", ""), as_json=False, quiet=False)
    assert "noise" not in capsys.readouterr().out


def test_of_a_budget_in_seconds_it_is_said_how_much_was_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = summary(tmp_path / "timed", "") | {"seconds": 24.2, "budget_seconds": 60.0}
    print_summary(told, as_json=False, quiet=False)
    assert capsys.readouterr().out.startswith("finished after 2 steps, 24 s of training of the 60 s of its budget\n")
