"""The list of checkpoints in a run's `checkpoints` folder: names, order, removal and quarantine.

A folder appears and disappears only by a rename, so `step-<number>` is never an incomplete checkpoint. If a resumed run
saves a step again, the new folder has an attempt suffix (`step-00000200.1`). The highest attempt is used.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal
from uuid import uuid4

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.training.checkpoint_manifest import is_newer, verify

CheckpointChoice = int | Literal["best", "last"]
"""Step of a checkpoint, "best" for the best held-out value, or "last" for the newest checkpoint."""
LATEST, BEST, QUARANTINE = "LATEST", "BEST", "quarantine"
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFTOVER = re.compile(rf"step-[\d.]+\.(?:partial|removed)-[0-9a-f]+|\.(?:{LATEST}|{BEST})\.(?:\w+\.)?partial")
_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt", ".distcp"}
_CONVERT = "convert the pickle to safetensors on a machine that you trust, because reading it can run code"


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first, without verifying them."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_place)


def best(folder: Path) -> Path | None:
    """Return the checkpoint that the file `BEST` names, or None if that folder does not exist."""
    file = folder / BEST
    name = file.read_bytes().decode(errors="replace").strip() if file.is_file() else ""
    return folder / name if _NAME.fullmatch(name) and (folder / name).is_dir() else None


def chosen_step(folder: Path, choice: CheckpointChoice | None) -> int | None:
    """Return the step of a chosen checkpoint; None for the newest. Raise IntegrityError if there is no best
    checkpoint."""
    if choice != "best":
        return None if choice == "last" else choice
    if path := best(folder):
        return step_of(path)
    raise IntegrityError(f"there is no best checkpoint in '{folder}'", fix="--checkpoint last")


def named_steps(folder: Path) -> dict[str, int]:
    """Return the steps of the "last" and the "best" checkpoint that exist, without verifying them."""
    chosen = {"last": next(reversed(checkpoints(folder)), None), "best": best(folder)}
    return {name: step_of(path) for name, path in chosen.items() if path}


def step_of(path: Path) -> int:
    return _place(path)[0]


def free_name(folder: Path, step: int) -> str:
    """Return the folder name for a new checkpoint of `step`. If the step was saved before, the name ends with the
    number of the attempt."""
    attempts = [_place(path)[1] for path in checkpoints(folder) if step_of(path) == step]
    return f"step-{step:08d}" + (f".{max(attempts) + 1}" if attempts else "")


def partial_name(step: int) -> str:
    return f"step-{step:08d}.partial-{uuid4().hex[:12]}"


def _place(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1]), int(match[2] or 0)


def remove_leftovers(folder: Path, files: AtomicFiles) -> None:
    """Remove the remains of an interrupted save or removal; finished checkpoints are kept."""
    for path in sorted(folder.glob("*")):
        if _LEFTOVER.fullmatch(path.name):
            (files.remove_tree if path.is_dir() else files.remove_file)(path)


def remove_old(saved: Path, keep: int, files: AtomicFiles, also: Collection[int] = ()) -> list[str]:
    """Remove old checkpoints and return notices. Keep `saved` and the newest intact checkpoints, up to `keep` in total.
    Also keep the best checkpoint and checkpoints of the steps in `also`."""
    folder, count, notices, old = saved.parent, 1, [], []
    for path in reversed(checkpoints(folder)):
        if path == saved or step_of(path) in also or is_newer(path):
            continue
        if count < keep:
            try:
                verify(path)
                count += 1
            except IntegrityError as error:
                notices.append(set_aside(path, error.what, files))
        elif path != best(folder):
            old.append(path.with_name(f"{path.name}.removed-{uuid4().hex[:12]}"))
            files.rename(path, old[-1])
    if old:
        files.sync_folder(folder)
    for path in old:
        files.remove_tree(path)
    return notices


def set_aside(path: Path, reason: str, files: AtomicFiles) -> str:
    """Move a damaged checkpoint to `quarantine/` and return the notice for the user."""
    quarantine = path.parent / QUARANTINE
    notice = f"checkpoint {path.name} is damaged: {reason}"
    try:
        files.make_folders(quarantine)
        target = quarantine / path.name
        while target.exists():
            target = quarantine / f"{path.name}-{uuid4().hex[:4]}"
        files.rename(path, target)
        files.sync_folder(quarantine)
        files.sync_folder(path.parent)
    except OSError as error:
        return f"{notice}; it could not be moved ({error.strerror})"
    return f"{notice}; moved to {QUARANTINE}/{target.name}"


def refuse_foreign(folder: Path) -> None:
    """Raise UsageError for a pickle, or for a folder with pickles and without a checkpoint."""
    if folder.is_file():
        with folder.open("rb") as content:
            start = content.read(4)
        if folder.suffix in _PICKLES or start[:1] == b"\x80" or start == b"PK\x03\x04":
            raise UsageError(f"'{folder}' is a pickle, and pickles are refused", _CONVERT)
        raise UsageError(f"'{folder}' is a file, not a folder", "pass the `checkpoints` folder of a run")
    if folder.is_dir() and not checkpoints(folder):
        for path in sorted(folder.iterdir()):
            if path.suffix in _PICKLES or path.name == ".metadata":
                raise UsageError(f"'{folder}' contains the pickle {path.name!r}, and pickles are refused", _CONVERT)
