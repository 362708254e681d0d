"""Python child processes that import the installed modules, not files of the working folder."""

import os
import sys

SAFE = "PYTHONSAFEPATH"
"""Environment variable. If it is set, Python does not import from the working folder, where a file such as torch.py
would shadow the package."""


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment, with `variables` added, for a child process that can import the same modules. If the
    working folder is on the import path, it comes last."""
    working_folder = os.path.realpath(os.getcwd())
    folders = sorted((each for each in sys.path if each), key=lambda each: os.path.realpath(each) == working_folder)
    return {**os.environ, SAFE: "1", "PYTHONPATH": os.pathsep.join(folders), **variables}


def leave_working_folder() -> None:
    """Remove the working folder from the import path of this process and of its child processes. `python -m` and
    `python -c` put the working folder first."""
    os.environ[SAFE] = "1"
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
