"""Weights & Biases: files of an offline run in FOLDER for `wandb sync`, or direct upload on request."""

from collections.abc import Mapping
from pathlib import Path

import wandb  # pyrefly: ignore

from thrifty.trackers.tracker import TrackedRun

PROJECT = "thrifty"


class _WandbRun:
    def __init__(self, folder: Path, run: TrackedRun, online: bool):
        self._run = wandb.init(
            project=PROJECT,
            name=run.name,
            id=run.id or None,
            notes=run.about,
            config=dict(run.settings),
            dir=str(folder),
            mode="online" if online else "offline",
            resume="allow" if run.id else None,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
            ),
        )
        self.id = self._run.id
        # our own step metric: wandb's step cannot decrease, but steps of a resumed run do
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        self._run.log({**values, "step": step, "moment": moment})

    def note(self, step: int, text: str) -> None:
        """Ignore the note, because wandb would create a media table for every line."""

    def finish(self, summary: Mapping[str, float]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


open_run = _WandbRun
