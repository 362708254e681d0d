"""Counts of a run's step, kept for the next start of the same run on this machine."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import thrifty
from thrifty.core.kept_results import kept_path
from thrifty.core.ranks import ranks
from thrifty.core.run_relative_settings import moments_of
from thrifty.core.stages import Stage
from thrifty.training.run_setup import PreparedRun

UNCOUNTED = ("name", "about", "seed", "budget", "evaluation", "checkpoints")
"""Sections of a recipe on which the counts do not depend."""
OF_UPDATES = range(Stage.CLIP, Stage.GROW)
"""Stages whose moments, such as the end of a warm-up, do not change the counts."""


def path_of_counts(prepared: PreparedRun, settings: Mapping[str, Any]) -> Path | None:
    """Return the path of the counts of runs that differ only in name, seed and budget. `settings` is the recipe as
    plain data. Return None if counts are not kept: on several ranks, for models of a folder, and with objects or
    techniques of the user, whose content may change."""
    recipe, run = prepared.recipe, prepared.run
    are_own = all(type(technique).__module__.startswith("thrifty.") for technique in run.techniques)
    if ranks() > 1 or recipe.objects.is_passed or recipe.model.folder or not are_own:
        return None
    sections = {name: value for name, value in settings.items() if name not in UNCOUNTED}
    depends_on_steps = any(any(moments_of(each)) for each in run.techniques if each.stage not in OF_UPDATES)
    return kept_path(
        "counts",
        {
            "recipe": sections,
            "steps": run.steps if depends_on_steps else 0,
            "data": dict(prepared.data.identity),
            "sources": _own_sources(),
        },
    )


@cache
def _own_sources() -> list[Any]:
    """Return names, sizes and times of change of this package's files."""
    root = Path(thrifty.__file__).parent
    facts = ((path, path.stat()) for path in sorted(root.rglob("*.py")))
    return [(str(path.relative_to(root)), fact.st_size, fact.st_mtime_ns) for path, fact in facts]
