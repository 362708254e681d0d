"""Refuse to overwrite a kept result."""

from pathlib import Path

from thrifty.core.errors import UsageError


def refuse_overwriting(place: str, file: Path, *beside: Path) -> None:
    """Raises UsageError where --keep names what is no .json file, or where it or a file beside it is there; `place` is
    the usual one for such a result."""
    if file.suffix != ".json":
        raise UsageError(f"--keep {file} is not a .json file", fix=f"--keep {place}")
    for path in (file, *beside):
        if path.exists():
            raise UsageError(f"{path} exists already", fix="remove it first, or keep the result under another name")
