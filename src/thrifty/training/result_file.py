"""Refuse to overwrite a kept result."""

from pathlib import Path

from thrifty.core.errors import UsageError


def refuse_overwriting(place: str, file: Path, *beside: Path) -> None:
    """Raise UsageError if --save-result names no .json file, or if it or a file in `beside` exists already; `place` is
    the usual one for such a result."""
    if file.suffix != ".json":
        raise UsageError(f"--save-result {file} is not a .json file", fix=f"--save-result {place}")
    for path in (file, *beside):
        if path.exists():
            raise UsageError(f"{path} exists already", fix="remove it first, or keep the result under another name")
