"""Listing of run folders, and of the studies, comparisons and lotteries that contain runs."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thrifty.reporting.run_record import is_run_folder

DEEPEST = 3
"""Maximum folder depth. Runs of a comparison are in subfolders."""
MOST = 5_000
"""Maximum number of listed folders."""
KINDS = {"study.json": "study", "comparison.json": "comparison", "lottery.json": "lottery", "sweep.json": "sweep"}
"""Kind of a folder, by the name of a file that the folder contains."""


@dataclass(frozen=True)
class RunListing:
    """Listed folder. `name` is the path below the folder of runs, with slashes. `name` identifies the folder in a
    query.
    """

    name: str
    path: Path
    kind: str
    """Kind of the folder: run, study, comparison, lottery or sweep."""
    group: str = ""
    """Name of the study, comparison, lottery or sweep to which the run belongs."""


def entries(runs: Path) -> list[RunListing]:
    """Return all listed folders. Requests can name only these folders, so no request can read other files."""
    listings: list[RunListing] = []
    for count, (name, path) in enumerate(_folders(runs, "", DEEPEST)):
        if count == MOST:
            break
        kind = next((kind for file, kind in KINDS.items() if (path / file).is_file()), None)
        if kind is None and is_run_folder(path):
            kind = "run"
        if kind is not None:
            listings.append(RunListing(name, path, kind))
    groups = [each for each in listings if each.kind != "run"]
    return [replace(each, group=_group_of(each, groups)) if each.kind == "run" else each for each in listings]


def _group_of(run: RunListing, groups: Sequence[RunListing]) -> str:
    """Return the name of the group whose folder contains a run, or the lottery whose rounds are next to its folder."""
    for group in groups:
        rounds = f"{group.name.removesuffix('-lottery')}-round-"
        if run.name.startswith(f"{group.name}/") or (group.kind == "lottery" and run.name.startswith(rounds)):
            return group.name
    return ""


def _is_shown(name: str) -> bool:
    return not name.startswith(".") and name.isprintable()


def _folders(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    try:
        with os.scandir(folder) as scanned:
            names = sorted(each.name for each in scanned if _is_shown(each.name) and each.is_dir())
    except OSError:
        return
    for name in names:
        path = folder / name
        yield prefix + name, path
        if depth > 1 and not is_run_folder(path):
            yield from _folders(path, f"{prefix}{name}/", depth - 1)
