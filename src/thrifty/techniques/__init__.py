"""The catalogue. One file is one technique, its path is its name, and this folder is the registry.

Third parties add techniques through the entry-point group `thrifty.techniques` (the entry's name is the technique's),
or by naming a folder of the same layout in $THRIFTY_TECHNIQUES. Their code is imported only when a technique is named.
"""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.old_names import TECHNIQUES
from thrifty.core.technique import Technique
from thrifty.techniques._customary_names import CUSTOMARY_NAMES, RELATED

for _folder in filter(None, os.environ.get("THRIFTY_TECHNIQUES", "").split(os.pathsep)):
    __path__.append(str(Path(_folder).resolve()))


def _walk(paths: list[str], prefix: str = "") -> list[str]:
    names: list[str] = []
    for module in pkgutil.iter_modules(paths):
        if module.name.startswith("_"):
            continue  # private to its group
        if module.ispkg:
            names += _walk([str(Path(path, module.name)) for path in paths], f"{prefix}{module.name}.")
        else:
            names.append(prefix + module.name)
    return names


def third_party() -> dict[str, EntryPoint]:
    """Entry points by the name of their technique, not loaded; a name that exists here is not theirs to take."""
    own = set(_walk(list(__path__)))
    return {entry.name: entry for entry in _installed() if entry.name not in own}


@cache
def _installed() -> EntryPoints:
    """What is installed does not change while a process runs, and takes long to ask."""
    return entry_points(group="thrifty.techniques")


def names() -> list[str]:
    """Every technique by name, sorted; nothing of anybody's is imported for this."""
    return sorted(set(_walk(list(__path__))) | third_party().keys())


def resolve(name: str) -> tuple[str, Mapping[str, Any]]:
    """Return a technique's full name from that, its last part (`lora`), or a customary name (`fsdp`), and the settings
    that the name implies. Raises UsageError with the nearest names if it is no technique's, or that of several."""
    known = names()
    if name in known:
        return name, {}
    if name in CUSTOMARY_NAMES:
        return CUSTOMARY_NAMES[name]
    last_parts = [full for full in known if full.rpartition(".")[2] == name]
    if len(last_parts) == 1:
        return last_parts[0], {}
    if candidates := RELATED.get(name, last_parts):
        raise UsageError(f"{name!r} is not the name of one technique", fix=f"choose {' or '.join(candidates)}")
    short = {full.rpartition(".")[2] for full in known if "." in full}
    likely = did_you_mean(TECHNIQUES.get(name, name), {*known, *CUSTOMARY_NAMES, *short})
    raise UsageError(f"there is no technique {name!r}", fix=likely if "mean" in likely else did_you_mean(name, known))


@cache
def find(name: str) -> type[Technique]:
    """The technique class of this name, full or not; raises UsageError as `resolve` does."""
    if name not in _walk(list(__path__)):  # only then is it worth asking everything that is installed
        name, _ = resolve(name)
    if outside := None if name in _walk(list(__path__)) else third_party()[name]:
        technique = outside.load()
        technique.name = name
        return technique
    *group, _ = name.split(".")
    if group:
        package = importlib.import_module(f"{__name__}.{'.'.join(group)}")
        package.__path__ = [str(Path(path, *group)) for path in __path__ if Path(path, *group).is_dir()]
    module = importlib.import_module(f"{__name__}.{name}")
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Technique) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise UsageError(f"{module.__file__} must hold exactly one technique, it holds {len(own)}")
    return own[0]
