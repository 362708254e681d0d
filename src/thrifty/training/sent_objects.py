"""Python values for child processes, sent through a file that only this user can read."""

import multiprocessing
import os
import pickle
import sys
import tempfile
from contextlib import suppress
from multiprocessing.spawn import get_preparation_data, prepare
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import reference

MAIN = ("init_main_from_name", "init_main_from_path")
_preparing: list[Path] = []


def write_value(value: Any, path: Path) -> None:
    """Write a value for a child process. Raise UsageError if the value cannot be sent."""
    refuse_start_during_import()
    try:
        content = pickle.dumps(value)
    except Exception as error:
        raise _unsendable(value, error) from error
    main = get_preparation_data("rank") if b"__main__" in content else {}
    script = main.get("init_main_from_path")
    can_import = os.path.isfile(script) if script else main.get("init_main_from_name")
    if b"__main__" in content and not can_import:  # no other process can import it
        raise _unsendable(value, UsageError("it was defined in a notebook, at a prompt or on standard input"))
    main = {name: main[name] for name in (*MAIN, "sys_argv") if name in main}
    about = {"path": list(sys.path), "main": main, "content": content}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        pickle.dump(about, file)


def can_be_sent(value: Any) -> bool:
    """Return True if a value can be sent to a child process."""
    with tempfile.TemporaryDirectory() as folder, suppress(UsageError):
        write_value(value, Path(folder, "value"))
        return True
    return False


def read_value(path: Path) -> Any:
    """Return the value that the parent process wrote. Raise UsageError if other users can write the file."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise UsageError(
                f"'{path}' is not private to this user",
                fix="start the ranks with thrifty, which writes this file itself",
            )
        about = pickle.load(file)  # noqa: S301
    sys.path += [place for place in about["path"] if place not in sys.path]
    _preparing.append(path)
    prepare(about["main"])
    _preparing.clear()
    return pickle.loads(about["content"])  # noqa: S301


def refuse_start_during_import() -> None:
    """Raise UsageError if a child process imports the script that started it. The script would start processes without
    end."""
    if _preparing or getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a started process imports the script, which would then start processes again",
            fix='put the call below `if __name__ == "__main__":`',
        )


def _unsendable(value: Any, error: Exception) -> UsageError:
    """Return the error for a value that cannot be sent. The error names the object at fault inside the value."""
    recipes = [part for part in _parts(value) if isinstance(part, Recipe)]
    objects = [recipe.objects for recipe in recipes] or [
        part for part in _parts(value) if isinstance(part, UserObjects)
    ]
    for name, passed in vars(objects[0]).items() if objects else ():
        try:
            pickle.dumps(passed)
        except Exception as reason:
            value, error = f"{name} ({reference(passed)})", reason
            break
    return UsageError(
        f"{value if isinstance(value, str) else 'a value'} cannot be sent to other processes: {error}",
        fix="define functions and classes at the top level of a module; or start the script with torchrun",
    )


def _parts(value: Any) -> list[Any]:
    return [value, *(part for each in value for part in _parts(each))] if isinstance(value, tuple) else [value]
