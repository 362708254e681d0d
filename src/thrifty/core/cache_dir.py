"""Where what can be fetched or measured again is kept; apart from the rest, so that it can be asked without torch."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$THRIFTY_CACHE, or ~/.cache/thrifty."""
    folder = os.environ.get("THRIFTY_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "thrifty"
