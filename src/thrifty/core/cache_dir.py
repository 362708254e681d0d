"""Cache folder for files that can be downloaded or measured again. This module does not import torch."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$THRIFTY_CACHE`, or `~/.cache/thrifty`."""
    folder = os.environ.get("THRIFTY_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "thrifty"
