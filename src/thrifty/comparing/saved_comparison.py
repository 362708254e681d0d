"""Saved results of comparisons, such as results/comparisons/NAME/DEVICE.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.training.result_file import refuse_overwriting
from thrifty.training.run_folder import RunFolder

SCHEMA = "thrifty.comparison/1"
FILE = "comparison.json"
BASELINE = "baseline"
"""Label of the variant that the other variants are compared with."""


def refuse_existing_comparison(file: Path) -> None:
    """Raise UsageError if the file of a saved result exists."""
    refuse_overwriting("results/comparisons/NAME/DEVICE.json", file)


def save_comparison(result: Mapping[str, Any], file: Path) -> None:
    """Write a finished comparison, without the keys "folder" and "exit_code"."""
    refuse_existing_comparison(file)
    AtomicFiles().make_folders(file.parent)
    saved = {name: value for name, value in result.items() if name not in ("folder", "exit_code")}
    RunFolder(file.parent).write_json(file.stem, saved)
