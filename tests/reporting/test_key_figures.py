import json
import math
import re

import pytest

from thrifty.reporting.key_figures import batch_advice, key_figures, verdict
from thrifty.reporting.run_record import read_run
from thrifty.reporting.run_state import KILLED, RUNNING
from thrifty.training.run_lock import RunLock


def test_the_verdict_states_loss_and_entropy_in_nats_and_bits(write_run):
    folder = write_run()
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"held_out_loss": 3.0, "unigram_entropy": 6.0, "bytes_per_token": 4.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    key = key_figures(read_run(folder))
    assert key.bits_per_byte(3.0) == pytest.approx(3 / math.log(2) / 4)
    assert verdict(key) == (
        "The held-out loss is 3.00 nats per token (1.08 bits per byte), 3.00 below the unigram entropy "
        "of 6.00 (2.16); the perplexity is 20.1."
    )


def test_a_loss_above_the_unigram_entropy_is_no_learning(write_run):
    folder = write_run()
    summary = json.loads((folder / "summary.json").read_text()) | {"held_out_loss": 6.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "not below the unigram entropy" in verdict(key_figures(read_run(folder)))


def test_memory_error_is_relative_to_the_measured_peak(write_run):
    key = key_figures(read_run(write_run()))
    assert key.memory_error == pytest.approx(2.63e8 / 2.76e8 - 1)
    assert key.share_of_peak == pytest.approx(key.flops_per_second / 2.4e12)


def test_the_noise_scale_is_the_latest_note(write_run):
    notes = [{"noise_scale": 90.0}, {}, {"noise_scale": 310.4, "tau": 1.0}, {"tau": 1.0}, {"noise_scale": None}]
    records = [{"kind": "step", "step": step, "loss": 3.0, "notes": note} for step, note in enumerate(notes, start=1)]
    key = key_figures(read_run(write_run(records=records)))
    assert (key.noise_scale, key.batch) == (310.4, 32)
    assert batch_advice(key) == ("gradient noise scale 310 examples (this batch: 32): much larger batches gain little")
    assert batch_advice(key_figures(read_run(write_run("other", steps=20)))) is None


def test_figures_of_a_running_run_come_from_its_records(write_run):
    folder = write_run(steps=120, summary=None)
    lock = RunLock(folder / "lock")
    key = key_figures(read_run(folder))
    lock.release()
    assert (key.status, key.steps, key.tokens) == (RUNNING, 120, 120 * 8192)
    assert key.held_out_loss is not None and key.peak_memory is None
    assert key.predicted_memory == pytest.approx(2.63e8)


def test_records_override_an_old_summary(write_run):
    folder = write_run(steps=120)
    with (folder / "records.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 121, "loss": 2.0, "tokens": 7}) + "\n")
    key = key_figures(read_run(folder))
    assert (key.status, key.steps, key.loss, key.tokens) == (KILLED, 121, 2.0, 7)
    assert key.unigram_entropy == 5.94


def test_a_killed_process_overrides_the_summary_status(write_run):
    folder = write_run(steps=120, summary={"status": "running", "exit_code": 0, "steps": 0})
    key = key_figures(read_run(folder))
    assert key.status == KILLED
    assert "was killed after step 120; `thrifty resume` continues the run" in verdict(key)


def test_no_verdict_before_the_first_evaluation(write_run):
    records = [{"kind": "step", "step": 1, "loss": 8.3}]
    key = key_figures(read_run(write_run(records=records, summary=None)))
    assert verdict(key).startswith("Nothing has been measured on held-out text yet")


def test_a_budget_in_seconds_is_reported_with_its_use(write_run):
    folder = write_run()
    recipe = folder / "recipe.toml"
    recipe.write_text(re.sub(r"\[budget\]\n[^\[]*", "[budget]\nseconds = 180.0\n\n", recipe.read_text()))
    summary = json.loads((folder / "summary.json").read_text()) | {"status": "finished", "used_seconds": 172.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    sentence = verdict(key_figures(read_run(folder)))
    assert sentence.endswith(" It used 2 min 52 s of its budget of 3 min 00 s.")
    (folder / "summary.json").write_text(json.dumps(summary | {"status": "interrupted"}))
    assert "of its budget" not in verdict(key_figures(read_run(folder)))
