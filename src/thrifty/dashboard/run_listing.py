"""What lies under the folder of runs: runs, and the studies, comparisons and lotteries that consist of runs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from thrifty.reporting.run_record import is_run_folder

DEEPEST = 3
"""Runs of a comparison lie in folders of its own."""
MOST = 5_000
"""Folders that are looked at."""
KINDS = {"study.json": "study", "comparison.json": "comparison", "lottery.json": "lottery"}
"""What a folder is by the file in it that says so."""


@dataclass(frozen=True)
class RunListing:
    """A folder worth showing. `name` is its path below the folder of runs, with slashes: how a page asks for it."""

    name: str
    path: Path
    kind: str
    """run, study, comparison or lottery."""


def entries(runs: Path) -> list[RunListing]:
    """All of them. Only these can be asked for, so no request reaches a file that is not in one of them."""
    listings = []
    for count, (name, path) in enumerate(_folders(runs, "", DEEPEST)):
        if count == MOST:
            break
        kind = next((kind for file, kind in KINDS.items() if (path / file).is_file()), None)
        if kind is None and is_run_folder(path):
            kind = "run"
        if kind is not None:
            listings.append(RunListing(name, path, kind))
    return listings


def _is_shown(name: str) -> bool:
    """Not what is hidden, nor a name that no page can hold: one that is not text."""
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
