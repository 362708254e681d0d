"""Cache folder for files that can be fetched or measured again. Imports no torch."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$THRIFTY_CACHE`, or `~/.cache/thrifty`."""
    folder = os.environ.get("THRIFTY_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "thrifty"
