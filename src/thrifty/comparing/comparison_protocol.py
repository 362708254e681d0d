"""A comparison's protocol, and its folder with comparison.json, which holds all that is known of it.

    schema  name  status  exit_code  environment; "error" where the comparison was stopped by one
    definition       "terms", and the recipe of each variant by its label, the baseline's first
    folders          what the names of a variant's runs begin with
    changes          of each variant, the techniques "added", "removed" and "changed" against the baseline
    runs             each with its run (a folder), arm, pilot or trial or seed, status, error, and what `seen` tells
    budgets          of each variant: steps, seconds, tokens and flops as planned, and what a "step" costs
    rates            of each variant: the learning rates tried, and the one taken
    outcome          once all pairs were run: of each variant means, ratios to the baseline, and its "verdict"

Seconds, bytes, FLOPs, joules. JSON has no infinity and no nan: null stands for them, and for what is not known.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from thrifty.comparing.equal_budgets import EQUAL, PILOT, Equal
from thrifty.comparing.variants import Variant
from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.core.old_names import rename_comparison
from thrifty.core.plain_values import differences
from thrifty.core.secret_redaction import redact
from thrifty.core.setting_bounds import Positive, SettingBound, check_bounds
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.training.run_environment import environment
from thrifty.training.run_folder import RunFolder

SCHEMA = "thrifty.comparison/1"
FILE = "comparison.json"
PILOTED, MEASURED = re.compile(r"-pilot-\d+$"), re.compile(r"-(trial|seed)-\d+$")
"""Names of run folders: of pilots, and of runs whose losses count."""
MACHINE = ("cpu", "python", "torch")
"""What all runs of a comparison share."""


@dataclass(frozen=True)
class ComparisonProtocol:
    """Budget, seeds and trials that are equal for all variants."""

    equal: Equal = "time"
    seeds: Positive = 8
    """Pairs: run k of a variant has its recipe's seed + k, so initialization and data order are the baseline's."""
    trials: Positive = 3
    """Learning rates that each variant is tried with, at its whole budget, around its recipe's; 1 tries none."""
    factor: Annotated[float, SettingBound(above=1)] = 2.0
    """Between a learning rate and the next one."""
    effect: Annotated[float, SettingBound(above=0)] = 0.01
    """The smallest difference worth knowing of, as a share of the baseline's loss: says how many seeds would see it."""
    pilot: Positive = PILOT
    """Steps of the first pilots; later ones take at least `PILOT_SECONDS`."""

    def __post_init__(self) -> None:
        check_bounds(self, "comparison")
        refuse_unknown("equal is", self.equal, EQUAL)

    @property
    def factors(self) -> list[float]:
        """Of the recipe's rate, in the order in which they are tried."""
        return [self.factor**power for power in range(-(self.trials // 2), self.trials - self.trials // 2)]


@contextmanager
def claim_folder(path: Path, variants: Sequence[Variant], protocol: ComparisonProtocol) -> Iterator[RunFolder]:
    """The folder of the comparison, new or of an earlier part of the same, locked. Where nothing but pilots was run,
    another comparison, or the same after an error, starts afresh."""
    meant = {"terms": asdict(protocol), "arms": {variant.label: recipe_to_data(variant.recipe) for variant in variants}}
    here = environment("cpu")
    is_there = (path / FILE).is_file()
    with RunFolder(path).lock() if is_there else RunFolder.create(path) as folder:
        before = rename_comparison(folder.read_json("comparison")) if is_there else {}
        other = _differences(before, meant, here) if before else []
        if (other or "error" in before) and not any(MEASURED.search(entry.name) for entry in path.iterdir()):
            for pilot in [entry for entry in path.iterdir() if PILOTED.search(entry.name)]:
                shutil.rmtree(pilot)
            before = {}
        elif other:
            raise UsageError(
                f"{path} is another comparison: " + "; ".join(other),
                fix="undo the change, or compare anew under another name: "
                "adding seeds after a look at the verdict would make chance findings likely",
            )
        if not before:
            folders = {variant.label: variant.folder for variant in variants}
            changes = {variant.label: variant.against(variants[0]) for variant in variants[1:]}
            about = {"schema": SCHEMA, "name": path.name, "definition": meant, "environment": here}
            folder.write_json("comparison", {**about, "folders": folders, "changes": changes, "runs": []})
        yield folder


def _differences(before: Mapping[str, Any], meant: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    machines = ({name: facts[name] for name in MACHINE} for facts in (before["environment"], here))
    return [*differences(redact(before["definition"]), redact(meant)), *differences(*machines)]
