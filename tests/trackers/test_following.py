"""Each record reaches a tracker once and in order, over several calls and during the run."""

import json
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner
from report_folders import records, write_run_folder

from thrifty.cli.track import command
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.trackers import record_follower
from thrifty.trackers.record_follower import scalars, track
from thrifty.trackers.tracker import KINDS, open_tracker
from thrifty.training.run_folder import RunFolder


class RecordingTracker:
    """Tracker that stores all calls."""

    opened: "list[RecordingTracker]"

    def __init__(self, run):
        self.run, self.id = run, run.id or "new id"
        self.logged, self.notes, self.finished = [], [], None

    def log(self, step, values, moment):
        self.logged.append((step, values, moment))

    def note(self, step, text):
        self.notes.append((step, text))

    def finish(self, summary):
        self.finished = dict(summary)


@pytest.fixture
def trackers(monkeypatch):
    """Opened trackers, in order."""
    opened = []

    def open_tracker(kind, folder, run, online):
        folder.mkdir(parents=True, exist_ok=True)
        opened.append(RecordingTracker(run))
        return opened[-1]

    monkeypatch.setattr(record_follower, "open_tracker", open_tracker)
    return opened


@pytest.fixture
def run(tmp_path):
    return write_run_folder(tmp_path / "runs" / "kjv", 60)


def append(run, new_records):
    with (run / "records.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in new_records))


def test_every_value_of_every_record_is_logged(run, tmp_path, trackers):
    written = track(run, "tensorboard", tmp_path / "out")
    (tracker,) = trackers
    new_records = records(60, every=5)
    assert written.records == len(new_records) and not written.again
    assert [(step, values) for step, values, _ in tracker.logged] == [
        (record["step"], scalars(record)) for record in new_records if record["kind"] in ("step", "evaluation")
    ]
    assert ("growth.stacking: 3 to 6 blocks" in dict(tracker.notes).values()) and len(tracker.notes) == 2
    assert tracker.run.settings["model.depth"] == "6" and tracker.finished["status"] == "finished"
    moments = [moment for _, _, moment in tracker.logged]
    assert moments == sorted(moments) and moments[0] > 1.7e9


def test_scalar_names_have_the_prefix_of_their_record():
    step = {
        "kind": "step",
        "step": 3,
        "loss": 2.0,
        "skipped": False,
        "memory": None,
        "notes": {"noise_scale": 9, "x": "y"},
    }
    assert scalars(step) == {"train/loss": 2.0, "notes/noise_scale": 9.0}
    assert scalars({"kind": "evaluation", "step": 3, "loss": 1.5, "accuracy": 0.5}) == {
        "held_out/loss": 1.5,
        "held_out/accuracy": 0.5,
    }
    assert scalars({"kind": "checkpoint", "step": 3, "bytes": 1}) == {}


def test_next_call_continues_at_the_stored_position(run, tmp_path, trackers):
    track(run, "tensorboard", tmp_path / "out")
    append(run, [{"kind": "step", "step": 61, "loss": 1.0}, {"kind": "step", "step": 62, "loss": 0.9}])
    with (run / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert track(run, "tensorboard", tmp_path / "out").records == 2
    with (run / "records.jsonl").open("a") as file:
        file.write('ep": 63, "loss": 0.8}\n')
    again = track(run, "tensorboard", tmp_path / "out")
    assert again.records == 1 and again.again
    assert [step for tracker in trackers[1:] for step, _, _ in tracker.logged] == [61, 62, 63]
    assert trackers[2].run.id == "new id" and trackers[2].run.step == 62


def test_each_tracker_has_its_own_position(run, tmp_path, trackers):
    for kind in KINDS:
        assert track(run, kind, tmp_path / "out").records > 60


def test_run_is_followed_to_its_end(run, tmp_path, trackers, monkeypatch):
    append(run, [])
    script = (
        "import sys; from pathlib import Path; from thrifty.training.run_folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock() as run:\n"
        "    print('held', flush=True); sys.stdin.readline()\n"
        "    run.append({'kind': 'step', 'step': 61, 'loss': 1.0})"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        process.stdout.readline()
        sleeps = []

        def sleep(seconds):
            if not sleeps:
                process.stdin.write("\n")
                process.stdin.close()
            sleeps.append(process.poll())

        monkeypatch.setattr(record_follower.time, "sleep", sleep)
        track(run, "tensorboard", tmp_path / "out", follow=True)
    assert sleeps and trackers[0].logged[-1][0] == 61


def test_running_run_without_follow_is_written_once(run, tmp_path, trackers):
    with RunFolder(run).lock():
        assert track(run, "tensorboard", tmp_path / "out").records > 60


def test_logged_records_count_as_done_if_a_later_one_fails(run, tmp_path, trackers, monkeypatch):
    def log(self, step, values, moment):
        if step == 61:
            raise OSError("no room")
        self.logged.append((step, values, moment))

    track(run, "tensorboard", tmp_path / "out")
    monkeypatch.setattr(RecordingTracker, "log", log)
    append(run, [{"kind": "step", "step": 61, "loss": 1.0}])
    with pytest.raises(OSError, match="no room"):
        track(run, "tensorboard", tmp_path / "out")
    assert trackers[-1].finished is not None
    monkeypatch.undo()


def test_another_run_of_the_same_name_is_refused(run, tmp_path, trackers):
    track(run, "tensorboard", tmp_path / "out")
    (run / "environment.json").write_text(json.dumps({"started": "2026-01-01T00:00:00+00:00"}))
    with pytest.raises(UsageError, match="another run") as refused:
        track(run, "tensorboard", tmp_path / "out")
    assert "--out" in refused.value.fix


def test_damaged_position_is_refused(run, tmp_path, trackers):
    track(run, "tensorboard", tmp_path / "out")
    (tmp_path / "out" / "tensorboard" / "kjv.position.json").write_text("{")
    with pytest.raises(IntegrityError, match="no valid position"):
        track(run, "tensorboard", tmp_path / "out")


def test_run_folder_is_only_read(run, tmp_path, trackers):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    track(run, "tensorboard", tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_missing_package_names_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in KINDS:
        with pytest.raises(UsageError, match=f"{kind} is not installed") as refused:
            track(run, kind, tmp_path / "out")
        assert refused.value.fix == f"pip install 'thrifty[{kind}]'"
    assert not (tmp_path / "out").exists()


def test_every_tracker_is_an_extra():
    import tomllib
    from pathlib import Path

    project = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text())["project"]
    assert {*KINDS} <= project["optional-dependencies"].keys()


def test_unknown_tracker_and_unsupported_online_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match="no tracker") as refused:
        open_tracker("tensorbord", tmp_path, None)
    assert "'tensorboard'" in refused.value.fix
    with pytest.raises(UsageError, match="files only"):
        open_tracker("tensorboard", tmp_path, None, online=True)


def test_command_prints_the_folder_and_a_viewer(run, tmp_path, trackers):
    out = tmp_path / "out"
    lines = CliRunner().invoke(command, [str(run), "--to", "tensorboard", "--out", str(out)]).stdout.splitlines()
    assert lines == [
        f"77 records in {out}/tensorboard",
        f"view them: tensorboard --logdir {out}/tensorboard",
    ]


def test_run_removed_while_followed_keeps_written_records(run, tmp_path, trackers, monkeypatch):
    def sleep(seconds):
        shutil.rmtree(run)

    monkeypatch.setattr(record_follower.time, "sleep", sleep)
    with RunFolder(run).lock():
        assert track(run, "tensorboard", tmp_path / "out", follow=True).records > 60
    assert trackers[0].finished == {} and (tmp_path / "out" / "tensorboard" / "kjv.position.json").is_file()
