"""What a tracker is asked to do, and which there are."""

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
"""How what was written is looked at. The name is that of the package, and of the extra that brings it."""


class Tracker(Protocol):
    """One run in a tracker's own files. Steps may be repeated after a resume: then the later values count."""

    id: str
    """By which a later start finds the same run again."""

    def log(self, step: int, values: Mapping[str, float], moment: float) -> None:
        """Numbers by name after a step, at a moment in seconds since 1970."""
        ...

    def note(self, step: int, text: str) -> None: ...

    def finish(self, summary: Mapping[str, float]) -> None:
        """The end of what is written now; the run itself may go on. `summary` are its numbers as a whole."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run before its first record."""

    name: str
    about: str
    settings: Mapping[str, str]
    """The resolved recipe by dotted paths."""
    recipe: str
    """The same as TOML."""
    id: str = ""
    """Of the tracker's run that is gone on with; empty for a new one."""
    step: int = -1
    """The last step of which numbers were passed on before."""


def open_tracker(kind: str, folder: Path, run: TrackedRun, online: bool = False) -> Tracker:
    """A tracker that writes into `folder`. Raises UsageError for an unknown one and where its package is missing.

    Nothing is sent anywhere unless `online`, which only Weights & Biases has.
    """
    refuse_unknown("there is no tracker", kind, KINDS)
    if online and kind != "wandb":
        raise UsageError(f"{kind} writes files only: there is nothing to send", fix="leave out --online")
    if importlib.util.find_spec(kind) is None:
        raise UsageError(f"{kind} is not installed", fix=f"pip install 'thrifty[{kind}]'")
    module: Any = importlib.import_module(f"thrifty.trackers.to_{kind}")
    folder.mkdir(parents=True, exist_ok=True)
    return module.open_run(folder, run, **({"online": online} if kind == "wandb" else {}))
