"""Where what can be fetched or measured again is kept; apart from the rest, so that it can be asked without torch."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$THRIFTY_CACHE, or ~/.cache/thrifty."""
    given = os.environ.get("THRIFTY_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "thrifty"
