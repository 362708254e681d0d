"""How processes of Python are started that run our modules, and no file that lies about in the working folder."""

import os
import sys

SAFE = "PYTHONSAFEPATH"
"""Set, Python does not look for modules in the working folder: a file there named like torch or pip would run in the
place of the installed one."""


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a process that imports what this one can, with these variables in it. Of the places where this
    process looks for modules the working folder comes last, if it is one."""
    here = os.path.realpath(os.getcwd())
    places = sorted((place for place in sys.path if place), key=lambda place: os.path.realpath(place) == here)
    return {**os.environ, SAFE: "1", "PYTHONPATH": os.pathsep.join(places), **variables}


def leave_working_folder() -> None:
    """Let this process and those that it starts look for modules in the working folder no more, which `python -m` and
    `python -c` put first."""
    os.environ[SAFE] = "1"
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
