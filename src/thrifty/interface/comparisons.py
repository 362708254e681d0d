"""`compare`: train variants and a baseline at an equal budget, and report a verdict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from rich.console import RenderableType

from thrifty.comparing import comparison
from thrifty.comparing.comparison_protocol import ComparisonProtocol
from thrifty.comparing.comparison_workers import read_workers
from thrifty.comparing.equal_budgets import Equal
from thrifty.comparing.paired_statistics import ALPHA, least_pairs
from thrifty.comparing.run_launchers import RunLauncher, SameProcess
from thrifty.comparing.saved_comparison import refuse_existing_comparison, save_comparison
from thrifty.comparing.variants import Change, variants_of
from thrifty.core.errors import for_reader, spelled
from thrifty.core.file_names import check_name
from thrifty.core.old_names import rename_comparison
from thrifty.core.plain_values import build
from thrifty.core.recipe import Recipe
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.reporting.comparison_charts import (
    PAPER,
    found_difference,
    interval_in_words,
    judged_of,
    judged_value,
    named_charts,
)
from thrifty.reporting.comparison_page import about, cautions, verdicts, write_comparison_page
from thrifty.reporting.comparison_tables import tables
from thrifty.reporting.measured_result import MeasuredResult, Rows, flat
from thrifty.reporting.number_format import MISSING, duration, significant
from thrifty.reporting.printed_result import ResultTable, lines
from thrifty.training.run_folder import RunFolder
from thrifty.training.sent_objects import can_be_sent, refuse_start_during_import


@dataclass(frozen=True, repr=False)
class ComparisonResult(MeasuredResult):
    """Verdicts on all variants, and all measurements: the content of comparison.json."""

    content: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Folder of the comparison. It contains the page report.html."""
        return Path(self.content["folder"])

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict on each variant: "better", "worse", "no difference", or the reason why there is no verdict."""
        return {label: word for label, word, _ in verdicts(self.content)}

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.content["exit_code"]

    def as_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def table(self) -> ResultTable:
        """Return a table with one row per variant. Columns: verdict, held-out loss or judged metric, difference to the
        baseline, and step time.
        """
        judged, rows = judged_of(self.content), []
        for label, variant in self.content.get("outcome", {}).get("variants", {}).items():
            verdict = variant.get("verdict", {})
            difference = found_difference(self.content, label) or {}
            ends = "" if difference.get("low") is None else f" ({difference['low']:+.3g} to {difference['high']:+.3g})"
            gap = f"{difference['mean']:+.3g}{ends}" if difference else MISSING
            loss, step = significant(judged_value(variant, judged), 4), duration(variant["step_time"])
            rows.append([label, verdict.get("verdict", "baseline"), loss, gap, step])
        head = (
            "variant",
            "verdict",
            f"held-out {judged}",
            f"minus baseline ({interval_in_words(self.content)})",
            "step time",
        )
        return ResultTable(head, rows)

    @property
    def page(self) -> Path:
        """HTML page of the comparison."""
        return self.folder / "report.html"

    def rows(self) -> Rows:
        return [flat({**entry, "judged_on": []}) for entry in self.content["runs"]]

    def charts(self) -> dict[str, Mapping[str, Any]]:
        """Return the loss (or judged metric) over time by its name, and "differences" of pairs."""
        return {name: chart.to_dict() for name, chart in named_charts(self.content, PAPER).items()}

    def __rich__(self) -> RenderableType:
        result = self.content
        printed: list[RenderableType] = [about(result)]
        for title, _, head, rows in tables(result)[:4]:
            if rows:
                printed += [f"\n{title}", ResultTable(head, rows)]
        printed.append("")
        printed += [f"{label}: {sentence}" for label, _, sentence in verdicts(result)]
        printed += [f"caution: {caution}" for caution in cautions(result)]
        failed = [entry for entry in result["runs"] if entry["status"] == "failed"]
        printed += [f"failed: {entry['run']} ({entry['variant']}): {entry['error']}" for entry in failed]
        if result["status"] == "interrupted":
            printed.append(f"interrupted; the same {spelled('command', 'call')} resumes it")
        return lines(*printed, f"{result['folder']}/report.html")


def open_comparison(folder: Path) -> ComparisonResult:
    """Write the page of a comparison's folder again, and return the result."""
    write_comparison_page(folder)
    content = rename_comparison(RunFolder(folder).read_json("comparison"))
    return ComparisonResult({"exit_code": 0, **content, "folder": str(folder)})


def compare(
    recipe: Recipe | str | Path | None = None,
    variants: Mapping[str, Recipe | Change | Sequence[Recipe | Change]] | None = None,
    *,
    equal_budget: Equal = ComparisonProtocol.equal,
    seeds: int = ComparisonProtocol.seeds,
    rate_trials: int = ComparisonProtocol.trials,
    rate_factor: float = ComparisonProtocol.factor,
    min_effect: float = ComparisonProtocol.effect,
    warmup_steps: int = ComparisonProtocol.pilot,
    workers: Sequence[str] = (),
    runs: str | Path = "runs",
    save_result: str | Path | None = None,
    retry: bool = False,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> ComparisonResult:
    """Compare variants with a baseline at an equal budget, with the same seeds.

    The verdict compares the held-out losses of all planned pairs. A pair is a run of a variant and a run of the
    baseline with the same seed.

    Args:
        recipe: Baseline: a recipe, its name or its file. `arguments` are as in `thrifty.recipe`; `name` is the
            name of the comparison.
        variants: Variants by name: another recipe, or one or more changes of the baseline. A change adds a technique
            (object, class, or name such as "lion:lr=2e-4", which replaces the baseline's optimizer), removes a
            technique ("-compile"), or sets a value ("data.batch=16").
        equal_budget: Budget that all variants share: "time", "flops", "tokens" or "steps".
        rate_trials: Number of learning rates to try per variant. Neighboring rates differ by the factor `rate_factor`.
        min_effect: Smallest relevant difference, as a fraction of the loss.
        warmup_steps: Number of steps of the pilot runs, which estimate step times for an equal time.
        workers: Commands that start runs on other machines, or "here" for this machine.
        save_result: A .json file for the result.
        retry: Repeat failed runs.

    Each run is a separate process. If objects cannot be sent to other processes, all runs use this process, and a
    warning is printed. The same call resumes an interrupted comparison.

    Raises UsageError if variants cannot be compared, or if the folder contains a different comparison.

    Example::

        verdict = thrifty.compare(recipe, {"lion": thrifty.Lion(lr=2e-4)}, seeds=8, budget="1min")
        print(verdict.table(), verdict.verdicts["lion"])
        verdict.figure().save("race.pdf")
    """
    values = {"equal": equal_budget, "seeds": seeds, "trials": rate_trials, "factor": rate_factor}
    protocol = build(ComparisonProtocol, {**values, "effect": min_effect, "pilot": warmup_steps}, "comparison")
    launchers = read_workers(workers, protocol.equal)
    if save_result:
        refuse_existing_comparison(Path(save_result))
    name = arguments.pop("name", None)
    read = variants_of(recipe_from("compare", recipe, arguments), variants or {})
    folder = Path(runs) / check_name(name or f"{read[0].recipe.name}-comparison", "--name")
    say = progress(quiet)
    if protocol.seeds < (least := least_pairs(ALPHA / max(len(read) - 1, 1))):
        some = "a variant requires" if len(read) == 2 else f"{len(read) - 1} variants require"
        say(f"caution: there will be no verdict, because {some} {least} pairs: {for_reader(f'--seeds {least}')}")
    able = able_launchers(launchers, [variant.recipe for variant in read], say)
    result = comparison.compare(read, protocol, folder, retry=retry, workers=able, say=say)
    if save_result and result["status"] == "finished":
        save_comparison(result, Path(save_result))
    return ComparisonResult(result)


def able_launchers(
    launchers: Sequence[RunLauncher], recipes: Sequence[Recipe], say: Callable[[str], None]
) -> Sequence[RunLauncher]:
    """Return launchers that can start these recipes, or only this process if objects cannot be sent to other
    processes. Raise UsageError in a process that imports the script which started it.
    """
    refuse_start_during_import()
    if all(can_be_sent(recipe.objects) for recipe in recipes):
        return launchers
    say("objects from Python cannot be sent to other processes: all runs use this process, one after another")
    return [SameProcess()]
