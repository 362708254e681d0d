"""Names that recipes and commands accept, with their cards, from `catalog.json`. Reading them imports no torch.

`python tools/catalog.py` writes the file, and a test compares both. Third-party techniques are not in the file.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["techniques", "recipes", "studies", "presets", "objectives", "designs"]


@cache
def catalog() -> Mapping[Kind, Mapping[str, Mapping[str, Any]]]:
    """Return the entries of each kind by name. An entry of a technique has the fields of a TechniqueProfile. Other
    entries have "about", one line, and those with a card have "card", "notes" and "settings".
    """
    return _tuples(json.loads((files("thrifty.interface") / "catalog.json").read_text(encoding="utf-8")))


def _tuples(value: Any) -> Any:
    """Return JSON data with tuples in place of lists, as in the settings of techniques."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
