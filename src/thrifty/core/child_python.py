"""Start Python processes that import the installed modules, and no file of the working folder."""

import os
import sys

SAFE = "PYTHONSAFEPATH"
"""If set, Python does not import from the working folder, where a file named like torch or pip would run in place of
the installed one."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment, with these variables, of a process that imports what this one can. The working folder
    comes last on its path, if it is on this one's."""
    here = os.path.realpath(os.getcwd())
    places = sorted((place for place in sys.path if place), key=lambda place: os.path.realpath(place) == here)
    return {**os.environ, SAFE: "1", "PYTHONPATH": os.pathsep.join(places), **variables}


def leave_working_folder() -> None:
    """Remove the working folder, which `python -m` and `python -c` put first, from the path of this process and of its
    child processes."""
    os.environ[SAFE] = "1"
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
