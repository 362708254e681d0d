"""Protocol of a comparison, and its folder with comparison.json, the record of the comparison.

    schema  name  status  exit_code  environment
    error            message of the error that stopped the comparison, if any
    definition       "protocol": the protocol; "variants": the recipe of each by label, the baseline first
    inputs           identity of the data and of given weights; a call with other inputs is refused
    folders          for each variant: the prefix of its run folders' names
    changes          for each variant: the techniques "added", "removed" and "changed" relative to the baseline
    runs             for each run: run (its folder), variant, pilot or trial or seed, status, error, and measured values
    budgets          for each variant: the "budget" of its runs; planned steps, seconds, tokens and flops; the cost of a
                     "step". For equal time, steps are the first estimate.
    rates            for each variant: the learning rates of all trials, and the chosen learning rate
    outcome          after all pairs ran, for each variant: means, ratios to the baseline, and its "verdict"

Units are seconds, bytes, FLOPs and joules. JSON null stands for infinity, NaN or an unknown value.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from thrifty.comparing.equal_budgets import EQUAL, PILOT, Equal
from thrifty.comparing.saved_comparison import FILE, SCHEMA
from thrifty.comparing.variants import Variant
from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.core.old_names import rename_comparison
from thrifty.core.plain_values import differences
from thrifty.core.secret_redaction import redact
from thrifty.core.setting_bounds import Positive, SettingBound, check_bounds
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.training.run_environment import environment
from thrifty.training.run_folder import RunFolder

PILOTED, MEASURED = re.compile(r"-pilot-\d+$"), re.compile(r"-(trial|seed)-\d+$")
"""Patterns for names of run folders: pilots; runs at trial learning rates and runs with compared seeds."""
MACHINE = ("cpu", "python", "torch")
"""Environment entries that must be equal for all runs of a comparison."""


@dataclass(frozen=True)
class ComparisonProtocol:
    """Budget, seeds and trials of a comparison, equal for all variants."""

    equal: Equal = "time"
    seeds: Positive = 8
    """Number of pairs. Run k of a variant uses the seed k + the seed of its recipe. It therefore has the same
    initialization and data order as run k of the baseline.
    """
    trials: Positive = 3
    """Number of learning rates tried per variant with the whole budget, around the recipe's rate; 1 keeps the recipe's
    rate.
    """
    factor: Annotated[float, SettingBound(above=1)] = 2.0
    """Ratio of successive trial learning rates."""
    effect: Annotated[float, SettingBound(above=0)] = 0.01
    """Smallest relevant difference, relative to the baseline's loss. The verdict reports how many pairs would detect
    this difference.
    """
    pilot: Positive = PILOT
    """Number of steps of each variant's pilot, for budgets of equal time. A variant whose first run fails within this
    number of steps stops the comparison.
    """

    def __post_init__(self) -> None:
        check_bounds(self, "comparison")
        refuse_unknown("equal is", self.equal, EQUAL)

    @property
    def factors(self) -> list[float]:
        """Multiples of the recipe's learning rate, in the order of trials."""
        return [self.factor**power for power in range(-(self.trials // 2), self.trials - self.trials // 2)]


@contextmanager
def claim_folder(path: Path, variants: Sequence[Variant], protocol: ComparisonProtocol) -> Iterator[RunFolder]:
    """Lock and yield the comparison's folder, which is new or holds the same comparison. While only pilots have run, a
    different comparison may use the folder, and the same comparison restarts after an error.
    """
    definition = {
        "protocol": asdict(protocol),
        "variants": {variant.label: recipe_to_data(variant.recipe) for variant in variants},
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
                f"'{path}' holds a different comparison: " + "; ".join(other),
                fix="undo the change; or, since seeds added after a verdict cause false findings, use --name NAME",
            )
        if not before:
            folders = {variant.label: variant.folder for variant in variants}
            changes = {variant.label: variant.against(variants[0]) for variant in variants[1:]}
            about = {"schema": SCHEMA, "name": path.name, "status": "running", "exit_code": 0}
            about |= {"definition": definition, "environment": here}
            folder.write_json("comparison", {**about, "folders": folders, "changes": changes, "runs": []})
        yield folder


def _differences(before: Mapping[str, Any], definition: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    machines = ({name: facts[name] for name in MACHINE} for facts in (before["environment"], here))
    return [*differences(redact(before["definition"]), redact(definition)), *differences(*machines)]
