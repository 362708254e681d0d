"""Tracker protocol, and the supported trackers."""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thrifty.core.errors import UsageError, refuse_unknown

KINDS = {
    "tensorboard": "tensorboard --logdir {folder}",
    "mlflow": "mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db",
    "wandb": "wandb sync --sync-all, in {folder}",
    "trackio": "TRACKIO_DIR={folder} trackio show",
}
"""Commands that display each tracker's files, keyed by the name of the tracker's package and of its extra."""


class Tracker(Protocol):
    """Writer of one run into a tracker's files. After a resume, later values of a step replace earlier values."""

    id: str
    """Id by which a later call finds the same run."""

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        """Log values by name after a step. `moment` is the time in seconds since 1970."""
        ...

    def note(self, step: int, text: str) -> None: ...

    def finish(self, summary: Mapping[str, float]) -> None:
        """End the writing; the run itself may continue. `summary` has values of the whole run."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run that a tracker receives before the first record."""

    name: str
    about: str
    settings: Mapping[str, str]
    """Resolved recipe by dotted paths."""
    recipe: str
    """Resolved recipe as TOML."""
    id: str = ""
    """Id of the run to continue in the tracker; empty for a new run."""
    step: int = -1
    """Last step whose values were logged before."""


def open_tracker(kind: str, folder: Path, run: TrackedRun, online: bool = False) -> Tracker:
    """Return a tracker that writes into `folder`. Nothing is uploaded unless `online` is True; only Weights & Biases
    supports `online`. Raise UsageError for an unknown tracker, or if the tracker's package is missing.
    """
    refuse_unknown("there is no tracker", kind, KINDS)
    if online and kind != "wandb":
        raise UsageError(f"{kind} writes files only: there is nothing to upload", fix="leave out --online")
    if importlib.util.find_spec(kind) is None:
        raise UsageError(f"{kind} is not installed", fix=f"pip install 'thrifty[{kind}]'")
    module: Any = importlib.import_module(f"thrifty.trackers.to_{kind}")
    folder.mkdir(parents=True, exist_ok=True)
    return module.open_run(folder, run, **({"online": online} if kind == "wandb" else {}))
