"""Content of the trackers' files, as read by the trackers' own packages."""

import importlib.util
import json
import sqlite3

import pytest
from report_folders import records, write_run_folder

from thrifty.trackers.record_follower import track

LOSSES = {record["step"]: record["loss"] for record in records(60, every=5) if record["kind"] == "step"}


@pytest.fixture
def run(tmp_path):
    return write_run_folder(tmp_path / "runs" / "kjv", 60)


def append(run, step, loss):
    with (run / "records.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": step, "loss": loss}) + "\n")


def test_tensorboard_shows_losses_of_a_resumed_run(run, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track(run, "tensorboard", tmp_path)

    def displayed(name):
        events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "kjv")).Reload()
        return {event.step: event.value for event in events.Scalars(name)}

    assert displayed("train/loss") == pytest.approx(LOSSES)
    assert displayed("held_out/loss").keys() == {*range(5, 61, 5)}
    append(run, 41, 7.5)
    track(run, "tensorboard", tmp_path)
    again = displayed("train/loss")
    assert again.keys() == {*range(1, 42)} and again[41] == 7.5 and again[40] == pytest.approx(LOSSES[40])


def test_mlflow_has_losses_settings_and_one_run(run, tmp_path):
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")
    track(run, "mlflow", tmp_path)
    append(run, 61, 7.5)
    track(run, "mlflow", tmp_path)
    client = tracking.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("thrifty")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.data.params["model.depth"] == "6" and tracked.info.status == "FINISHED"
    losses = {metric.step: metric.value for metric in client.get_metric_history(tracked.info.run_id, "train/loss")}
    assert losses == pytest.approx(LOSSES | {61: 7.5})


def test_wandb_writes_an_offline_run_and_uploads_nothing(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for proxy in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    track(run, "wandb", tmp_path)
    (database,) = (tmp_path / "wandb").glob("wandb/offline-run-*/run-*.wandb")
    content = database.read_bytes()
    assert b"train/loss" in content and b"held_out/loss" in content and b"model.depth" in content


def test_trackio_has_every_record_once(run, tmp_path):
    if importlib.util.find_spec("trackio") is None:  # an import here would fix trackio's folder
        pytest.skip("trackio is not installed")
    track(run, "trackio", tmp_path)
    append(run, 61, 7.5)
    track(run, "trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "thrifty.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    losses = {step: metrics["train/loss"] for step, metrics in logged if "train/loss" in metrics}
    assert losses == pytest.approx(LOSSES | {61: 7.5}) and len(rows) == len(LOSSES) + 12 + 1
