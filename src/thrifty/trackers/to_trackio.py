"""Trackio: a run of the project `thrifty` in Trackio's database in FOLDER."""

import os
from collections.abc import Mapping
from pathlib import Path

from thrifty.trackers.tracker import TrackedRun

PROJECT = "thrifty"


class _TrackioRun:
    def __init__(self, folder: Path, run: TrackedRun):
        os.environ["TRACKIO_DIR"] = str(folder.resolve())  # read as trackio is imported
        import trackio  # pyrefly: ignore

        self.id = run.name
        resume = "must" if run.id else "never"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(PROJECT, run.name, config=dict(run.settings), resume=resume, **quiet)

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        self._run.log(dict(values), step=step)

    def note(self, step: int, text: str) -> None:
        """Ignore the note, because Trackio would send a text as an alert."""

    def finish(self, summary: Mapping[str, float]) -> None:
        self._run.finish()


open_run = _TrackioRun
