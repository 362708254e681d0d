"""Protection of saved results against overwriting."""

from pathlib import Path

from thrifty.core.errors import UsageError


def refuse_overwriting(place: str, file: Path, *beside: Path) -> None:
    """Raise UsageError if --save-result is not a .json file, or if it or a file in `beside` exists; `place` is an
    example path."""
    if file.suffix != ".json":
        raise UsageError(f"--save-result {file} is not a .json file", fix=f"--save-result {place}")
    for path in (file, *beside):
        if path.exists():
            raise UsageError(f"{path} exists already", fix="remove it first, or keep the result under another name")
