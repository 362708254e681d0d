"""Protocol of a comparison, and its folder with comparison.json, the record of the comparison.

    schema  name  status  exit_code  environment; "error" if an error stopped the comparison
    definition       "terms", and the recipe of each variant by label, the baseline's first
    folders          name prefixes of each variant's run folders
    changes          for each variant, the techniques "added", "removed" and "changed" against the baseline
    runs             for each run: run (its folder), arm, pilot or trial or seed, status, error, and measured values
    budgets          for each variant: planned steps, seconds, tokens and flops, and the cost of a "step"
    rates            for each variant: the learning rates tried, and the chosen one
    outcome          once all pairs ran: for each variant means, ratios to the baseline, and its "verdict"

Units are seconds, bytes, FLOPs and joules. JSON has no infinity and no NaN: null means one of these, or unknown.
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
"""Names of run folders: pilots, and runs whose losses count."""
MACHINE = ("cpu", "python", "torch")
"""Facts of the environment that all runs of a comparison must share."""


@dataclass(frozen=True)
class ComparisonProtocol:
    """Budget, seeds and trials, equal for all variants."""

    equal: Equal = "time"
    seeds: Positive = 8
    """Number of pairs. Run k of a variant has its recipe's seed + k, and so the baseline's initialization and data
    order."""
    trials: Positive = 3
    """Learning rates tried per variant, at the whole budget, around the recipe's rate; 1 tries none."""
    factor: Annotated[float, SettingBound(above=1)] = 2.0
    """Factor between a learning rate and the next one."""
    effect: Annotated[float, SettingBound(above=0)] = 0.01
    """Smallest relevant difference, relative to the baseline's loss, for the number of seeds that would detect it."""
    pilot: Positive = PILOT
    """Steps of the first pilots; later ones take at least `PILOT_SECONDS`."""

    def __post_init__(self) -> None:
        check_bounds(self, "comparison")
        refuse_unknown("equal is", self.equal, EQUAL)

    @property
    def factors(self) -> list[float]:
        """Multiples of the recipe's learning rate, in the order of trials."""
        return [self.factor**power for power in range(-(self.trials // 2), self.trials - self.trials // 2)]


@contextmanager
def claim_folder(path: Path, variants: Sequence[Variant], protocol: ComparisonProtocol) -> Iterator[RunFolder]:
    """Yield the comparison's folder, new or of an earlier part of the same comparison, locked. If only pilots ran so
    far, another comparison may take the folder, and the same one restarts after an error."""
    definition = {
        "terms": asdict(protocol),
        "arms": {variant.label: recipe_to_data(variant.recipe) for variant in variants},
    }
    here = environment("cpu")
    exists = (path / FILE).is_file()
    with RunFolder(path).lock() if exists else RunFolder.create(path) as folder:
        before = rename_comparison(folder.read_json("comparison")) if exists else {}
        other = _differences(before, definition, here) if before else []
        if (other or "error" in before) and not any(MEASURED.search(entry.name) for entry in path.iterdir()):
            for pilot in [entry for entry in path.iterdir() if PILOTED.search(entry.name)]:
                shutil.rmtree(pilot)
            before = {}
        elif other:
            raise UsageError(
                f"{path} is another comparison: " + "; ".join(other),
                fix="undo the change, or compare under another name: "
                "seeds added after a look at the verdict make false findings likely",
            )
        if not before:
            folders = {variant.label: variant.folder for variant in variants}
            changes = {variant.label: variant.against(variants[0]) for variant in variants[1:]}
            about = {"schema": SCHEMA, "name": path.name, "definition": definition, "environment": here}
            folder.write_json("comparison", {**about, "folders": folders, "changes": changes, "runs": []})
        yield folder


def _differences(before: Mapping[str, Any], definition: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    machines = ({name: facts[name] for name in MACHINE} for facts in (before["environment"], here))
    return [*differences(redact(before["definition"]), redact(definition)), *differences(*machines)]
