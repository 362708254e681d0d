"""A run that is read incrementally has the same key figures as its report."""

import json

from report_folders import records

from thrifty.dashboard.run_index import RunIndex
from thrifty.reporting.key_figures import key_figures
from thrifty.reporting.run_charts import EACH_POINTS, figures
from thrifty.reporting.run_record import read_run
from thrifty.reporting.run_tables import tiles, timeline


def append(folder, made):
    with (folder / "records.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in made))


def same_as_report(index, folder):
    index.advance(10.0)
    record, whole = index.record(), read_run(folder)
    ours, theirs = key_figures(record, index.curves), key_figures(whole)
    assert ours == theirs and tiles(ours) == tiles(theirs)
    assert timeline(record) == timeline(whole) and record.damage == whole.damage


def test_the_index_matches_the_report_at_every_moment(run_folder):
    made = records(300, every=20)
    made[100] |= {"loss": None, "skipped": True}
    folder = run_folder(records=[], summary=None)
    index = RunIndex(folder)
    same_as_report(index, folder)
    for first in range(0, len(made), 37):
        append(folder, made[first : first + 37])
        same_as_report(index, folder)


def test_a_resumed_run_counts_the_last_record_of_each_step(run_folder):
    made = records(200, every=20)
    folder = run_folder(records=made)
    index = RunIndex(folder)
    same_as_report(index, folder)
    append(
        folder, [record | ({"loss": 1.5} if "loss" in record else {}) for record in made if 120 < record["step"] < 160]
    )
    same_as_report(index, folder)
    loss = index.curves.steps.curve("loss")
    assert len(loss) == 200 and loss.values[139] == 1.5 and loss.values[180] != 1.5


def test_only_appended_records_are_read(run_folder, monkeypatch):
    folder = run_folder(records=records(2000))
    index = RunIndex(folder)
    index.advance(10.0)
    taken = []
    take = index._add
    monkeypatch.setattr(index, "_add", lambda line: (taken.append(line), take(line)))
    before = index.version
    index.advance(10.0)
    assert not taken and index.version == before
    append(folder, [{"kind": "step", "step": 2001, "loss": 2.0}])
    index.advance(10.0)
    assert len(taken) == 1 and index.version != before and index.record().last_step == 2001


def test_a_long_run_is_read_in_several_calls(run_folder):
    folder = run_folder(records=records(400))
    index = RunIndex(folder)
    index.tail.chunk = 1 << 14
    index.advance(0.0)
    assert 0 < index.share < 1
    while index.share < 1:
        index.advance(0.0)
    index.advance(1.0)
    same_as_report(index, folder)


def test_a_restarted_run_of_the_same_name_replaces_the_old(run_folder):
    folder = run_folder(records=records(300))
    index = RunIndex(folder)
    index.advance(10.0)
    (folder / "records.jsonl").write_text("")
    index.advance(10.0)
    assert index.record().last_step == 0
    append(folder, records(5))
    (folder / "summary.json").unlink()
    same_as_report(index, folder)
    assert index.record().last_step == 5


def test_damaged_lines_are_skipped_and_counted(run_folder):
    folder = run_folder(records=records(30))
    with (folder / "records.jsonl").open("ab") as file:
        file.write(b'not a record\n[1]\n{"kind": "step", "step": 31, "loss": 1.0}\n')
        file.write(b'{"kind": "step", "step": 1e300}\n' + b"[" * 100_000 + b"\n")
    index = RunIndex(folder)
    index.advance(10.0)
    assert index.record().damage == ("records.jsonl: 4 unreadable lines were skipped.",)
    assert index.record().last_step == 31


def drawn(folder):
    index = RunIndex(folder)
    index.advance(10.0)
    record = index.record()
    made = figures(record, key_figures(record, index.curves), index.curves)
    return {figure.id: figure for figure in made}


def test_a_spike_of_one_step_in_a_long_run_is_drawn(run_folder):
    made = records(5000)
    next(record for record in made if record["step"] == 3210)["loss"] = 77.0
    each = drawn(run_folder(records=made))["loss"].data["each"]
    assert {"step": 3210, "value": 77.0} in each and len(each) <= EACH_POINTS


def test_memory_chart_has_predicted_and_measured_peak(run_folder):
    figure = drawn(run_folder())["memory"]
    labels = [row["label"] for name in ("above", "below") for row in figure.data[name]]
    assert labels == ["measured peak 276 MB", "predicted peak 263 MB"] and figure.unit == "MB"


def test_memory_chart_of_a_running_run_has_the_highest_so_far(run_folder):
    folder = run_folder(summary={"status": "running", "steps": 0, "predicted_memory": 2.63e8, "peak_memory": 1e7})
    figure = drawn(folder)["memory"]
    (highest,) = [row["label"] for name in ("above", "below") for row in figure.data[name] if "so far" in row["label"]]
    assert highest.startswith("highest so far 22")


def test_one_evaluation_has_a_chart_and_no_record_has_none(run_folder):
    assert drawn(run_folder("empty", records=[])) == {}
    figure = drawn(run_folder("one", records=[{"kind": "evaluation", "step": 0, "loss": 8.0}]))["loss"]
    assert figure.data["held_out"] == [{"step": 0, "value": 8.0}] and "smoothed" not in figure.data


def test_the_charts_are_those_of_the_report(run_folder):
    folder = run_folder(records=records(500, every=20))
    whole = read_run(folder)
    assert list(drawn(folder).values()) == figures(whole, key_figures(whole))
