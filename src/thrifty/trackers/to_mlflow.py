"""MLflow: a run of the experiment `thrifty` in the database FOLDER/mlflow.db. File stores of MLflow are deprecated."""

from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag  # pyrefly: ignore
from mlflow.tracking import MlflowClient  # pyrefly: ignore

from thrifty.trackers.tracker import TrackedRun

EXPERIMENT = "thrifty"
AT_ONCE = 900
"""Number of metrics per batch; MLflow accepts at most 1,000."""
STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "killed": "KILLED", "stopped": "FAILED"}
"""MLflow's status for each status of a run. A running run stays RUNNING."""
LONGEST = 6000
"""Maximum number of characters of a setting in MLflow."""


class _Store:
    def __init__(self, folder: Path, run: TrackedRun):
        self.folder = folder.resolve()
        self._client = MlflowClient(tracking_uri=f"sqlite:///{self.folder / 'mlflow.db'}")
        self._waiting: list[Metric] = []
        self.id = run.id or self._begin(run)
        self._client.update_run(self.id, status="RUNNING")

    def _begin(self, run: TrackedRun) -> str:
        record = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = record.experiment_id if record else self._client.create_experiment(EXPERIMENT, self._files)
        begun = self._client.create_run(experiment, run_name=run.name)
        settings = [Param(name, value[:LONGEST]) for name, value in run.settings.items()]
        for first in range(0, len(settings), 100):
            self._client.log_batch(begun.info.run_id, params=settings[first : first + 100])
        self._client.log_batch(begun.info.run_id, tags=[RunTag("mlflow.note.content", run.about)])
        self._client.log_text(begun.info.run_id, run.recipe, "recipe.toml")
        return begun.info.run_id

    @property
    def _files(self) -> str:
        """URI of the folder for files of runs. The URI is set explicitly, because MLflow's default depends on the
        working folder."""
        return (self.folder / "files").as_uri()

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        self._waiting += [Metric(name, value, int(1000 * moment), step) for name, value in values.items()]
        if len(self._waiting) >= AT_ONCE:
            self._write()

    def note(self, step: int, text: str) -> None:
        """Ignore the note: MLflow has metrics, settings and files, but no text events."""

    def finish(self, summary: Mapping[str, float]) -> None:
        self._write()
        for name, value in summary.items():
            self._client.set_tag(self.id, name, value)
        self._client.update_run(self.id, status=STATUS.get(str(summary.get("status")), "RUNNING"))

    def _write(self) -> None:
        for first in range(0, len(self._waiting), AT_ONCE):
            self._client.log_batch(self.id, metrics=self._waiting[first : first + AT_ONCE])
        self._waiting.clear()


open_run = _Store
