"""Protection of saved results against overwriting."""

from pathlib import Path

from thrifty.core.errors import UsageError


def refuse_overwriting(place: str, file: Path, *beside: Path) -> None:
    """Raise UsageError if `file` is not a .json file, or if `file` or one of the files `beside` exists. `place` is the
    path that the fix suggests."""
    if file.suffix != ".json":
        raise UsageError(f"--save-result '{file}' is not a .json file", fix=f"--save-result {place}")
    for path in (file, *beside):
        if path.exists():
            raise UsageError(f"'{path}' exists already", fix="remove it first; or keep the result under another name")
