"""The printed end of a run."""

import json
from pathlib import Path
from typing import Any

from thrifty.interface.run_endings import ending


def summary(folder: Path, techniques: str) -> dict[str, Any]:
    folder.mkdir()
    (folder / "recipe.toml").write_text(f"[data]\nbatch = 8\n{techniques}")
    records = [{"kind": "step", "step": step, "notes": {"noise_scale": 50.0 * step}} for step in (1, 2)]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figures = {"held_out_loss": 3.0, "unigram_entropy": 5.0, "bytes_per_token": 3.0}
    return {"folder": str(folder), "status": "finished", "steps": 2, "seconds": 1.0, **figures}


def test_a_measured_noise_scale_ends_with_batch_advice(tmp_path: Path) -> None:
    measured = '[[techniques]]\nname = "measure.noise_scale"\n'
    *_, advice, last = ending(summary(tmp_path / "measured", measured))
    assert advice == "gradient noise scale 100 examples (this batch: 8): much larger batches gain little"
    assert last.startswith("run folder")


def test_a_run_that_did_not_measure_says_nothing_of_it(tmp_path: Path) -> None:
    assert "noise" not in "".join(ending(summary(tmp_path / "plain", "")))


def test_runs_print_the_used_part_of_a_time_budget(tmp_path: Path) -> None:
    told = summary(tmp_path / "timed", "") | {"seconds": 24.2, "budget_seconds": 60.0}
    assert ending(told)[0] == "finished after 2 steps, 24 s of training of the 60 s of its budget"
