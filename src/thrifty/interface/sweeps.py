"""`sweep`: search over settings of a recipe by successive halving."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import altair as alt
from rich.console import RenderableType

from thrifty.comparing.comparison_workers import read_workers
from thrifty.core.errors import UsageError, spelled
from thrifty.core.file_names import check_name
from thrifty.core.plain_values import build
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.experiments.setting_ranges import read_space
from thrifty.experiments.successive_halving import SweepSettings, run_sweep
from thrifty.interface.comparisons import able_launchers
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.interface.training import RunResult
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.measured_result import MeasuredResult, Rows
from thrifty.reporting.number_format import significant
from thrifty.reporting.printed_result import ResultTable, lines
from thrifty.reporting.result_page import GOOD, PHONE, PageVerdict, ResultPage, page_chart
from thrifty.reporting.run_tables import TextTable
from thrifty.training.run_folder import RunFolder


@dataclass(frozen=True, repr=False)
class SweepResult(MeasuredResult):
    """Trials of a sweep, best first: the content of sweep.json."""

    content: Mapping[str, Any]
    objects: UserObjects = field(default_factory=UserObjects)

    @property
    def folder(self) -> Path:
        """Folder of the sweep, with the run folder of each trial."""
        return Path(self.content["folder"])

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.content["exit_code"]

    @cached_property
    def trials(self) -> list[Mapping[str, Any]]:
        """Trials with "run", "settings" and "rungs": first the trials that trained longest, then by last value."""
        return sorted(self.content["trials"], key=_place)

    @property
    def best(self) -> RunResult:
        """Run of the best trial, trained with the whole budget. Raise UsageError for an interrupted sweep."""
        folder = self.folder / self._best["run"]
        return RunResult(folder, RunFolder(folder).read_json("summary"), self.objects)

    @property
    def best_settings(self) -> dict[str, Any]:
        """Settings of the best trial, by path in the recipe. Raise UsageError for an interrupted sweep."""
        return dict(self._best["settings"])

    @property
    def _best(self) -> Mapping[str, Any]:
        if "best" not in self.content or self.content["status"] != "finished":
            again = spelled("repeat the same command to resume it", "repeat the same call to resume it")
            raise UsageError(f"the sweep '{self.folder}' is {self.content['status']}", fix=again)
        return next(trial for trial in self.content["trials"] if trial["run"] == self.content["best"])

    def as_dict(self) -> dict[str, Any]:
        return dict(self.content)

    def rows(self) -> Rows:
        return [
            {"trial": trial["run"], **trial["settings"], **rung, "error": trial.get("error", "")}
            for trial in self.content["trials"]
            for rung in trial["rungs"] or [{}]
        ]

    def table(self) -> ResultTable:
        """Return a table with one row per trial: its settings, the trained fraction of the budget, and the last
        held-out value.
        """
        paths = list(self.content["definition"]["over"])
        judged = f"held-out {self._judge}"
        rows = []
        for trial in self.trials:
            last = trial["rungs"][-1] if trial["rungs"] else {"fraction": 0, "judged": None}
            shown = [str(trial["settings"][path]) for path in paths]
            value = significant(last["judged"], 4) + (f" (failed: {trial['error']})" if "error" in trial else "")
            rows.append([trial["run"], *shown, f"{last['fraction']:.0%}", value])
        return ResultTable(["trial", *(path.removeprefix("techniques.") for path in paths), "budget", judged], rows)

    @property
    def _judge(self) -> str:
        return self.content["definition"]["recipe"].get("evaluation", {}).get("judge", "loss")

    def charts(self) -> dict[str, Mapping[str, Any]]:
        """Return the chart "rungs": the held-out value of each trial at each rung. The best trial is highlighted."""
        return {"rungs": self._rungs(640).to_dict()} if self._points else {}

    @property
    def _points(self) -> Rows:
        best = self.content.get("best", "")
        return [{**row, "best": row["trial"] == best} for row in self.rows() if row.get("judged") is not None]

    def _rungs(self, width: int) -> alt.Chart:
        points = self._points
        highlight = alt.condition("datum.best", alt.value(css_variable("train")), alt.value(css_variable("faint")))
        axis = alt.Axis(values=sorted({point["fraction"] for point in points}), format=".0%")
        chart = alt.Chart(alt.Data(values=points)).mark_line(point=True).encode(
            x=alt.X("fraction:Q", title="fraction of the budget", axis=axis, scale=alt.Scale(type="log", nice=False)),
            y=alt.Y("judged:Q", title=f"held-out {self._judge}", scale=alt.Scale(zero=False)),
            detail="trial:N",
            color=highlight,
        )  # fmt: skip
        return chart.properties(width=width, height=320 if width > PHONE else 240)

    @property
    def page(self) -> Path:
        """HTML page of the sweep."""
        return self.folder / "report.html"

    def render(self) -> str:
        """Return the HTML page with the best settings, the chart of rungs and the table of trials."""
        table, status = self.table(), self.content["status"]
        caption = "Each line is a trial; the highlighted line is the best trial."
        verdicts = []
        if status == "finished":
            settings = ", ".join(
                f"{path.removeprefix('techniques.')} {value}" for path, value in self.best_settings.items()
            )
            last = self._best["rungs"][-1]["judged"]
            sentence = f"Held-out {self._judge} {significant(last, 4)} in {self._best['run']}."
            verdicts = [PageVerdict(f"Best: {settings}", sentence, self._compute, GOOD)]
        return ResultPage(
            kind="sweep",
            name=self.folder.name,
            status=status,
            about=f"Search over {' and '.join(table.head[1:-2])} by successive halving, {len(self.trials)} trials.",
            verdicts=verdicts,
            pending=f"The sweep is {status}; the best settings appear at its end.",
            cautions=self._cautions() if verdicts else [],
            charts=[page_chart("Trials at each rung", caption, self._rungs)] if self._points else [],
            tables=[TextTable("Trials", table.head, table.rows, frozenset(range(1, len(table.head))))],
            source="All values are in sweep.json in the same folder; each trial has its own folder.",
        ).render()

    def write_page(self) -> None:
        """Write report.html."""
        RunFolder(self.folder).write_text(self.page.name, self.render())

    @property
    def _compute(self) -> str:
        whole = sum(trial["rungs"][-1]["fraction"] for trial in self.content["trials"] if trial["rungs"])
        return f"{len(self.content['trials'])} trials for the compute of {whole:.3g} whole runs"

    def __rich__(self) -> RenderableType:
        return lines(self.table(), *self._sentences(), str(self.page))

    def _sentences(self) -> list[str]:
        printed: list[str] = []
        if self.content["status"] == "finished":
            printed.append(self._compute)
            settings = " ".join(f"--set {path}={value}" for path, value in self.best_settings.items())
            printed.append(f"best: {self.folder / self.content['best']}, trained with {settings}")
            printed += [f"caution: {caution}" for caution in self._cautions()]
        else:
            printed.append(f"{self.content['status']}; the same {spelled('command', 'call')} resumes it")
        return printed

    def _cautions(self) -> list[str]:
        """Return a caution for each best value at an end of its range or list of numbers."""
        cautions = []
        definition = self.content["definition"]
        if "data.batch" in definition["over"] and definition["recipe"].get("budget", {}).get("steps"):
            cautions.append(
                "with equal steps, a larger batch sees more examples: a budget in tokens, epochs or time is fairer"
            )
        for path, values in definition["over"].items():
            best = self.best_settings[path]
            ends = [values["low"], values["high"]] if isinstance(values, Mapping) else values
            if isinstance(best, int | float) and len(ends) > 1 and best in (min(ends), max(ends)):
                cautions.append(f"the best {path} is {best}, at the end of its values; wider values may be better")
        return cautions


def open_sweep(folder: Path) -> SweepResult:
    """Write the page of a sweep's folder, and return the result."""
    result = SweepResult(
        {"exit_code": 0, "status": "running", **RunFolder(folder).read_json("sweep"), "folder": str(folder)}
    )
    result.write_page()
    return result


def _place(trial: Mapping[str, Any]) -> tuple[bool, int, float]:
    last = trial["rungs"][-1] if trial["rungs"] else {"rank": None}
    return "error" in trial, -len(trial["rungs"]), float("inf") if last["rank"] is None else last["rank"]


def sweep(
    recipe: Recipe | str | Path | None = None,
    over: Mapping[str, str | Sequence[Any]] | None = None,
    *,
    trials: int | None = None,
    reduction: int = SweepSettings.reduction,
    rungs: int | None = None,
    workers: Sequence[str] = (),
    runs: str | Path = "runs",
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> SweepResult:
    """Search over settings of a recipe by successive halving (Jamieson & Talwalkar 2016; Li et al. 2020).

    All trials train for a fraction of the budget. The best third resumes, again and again, until one trial has the
    whole budget. The runs are in the folder `runs`/NAME. The best run equals `thrifty.train` with its settings.

    Args:
        recipe: A recipe, its name or its file. `arguments` are as in `thrifty.recipe`; `name` is the name of the sweep,
            and `seed` also seeds the search.
        over: Values by path in the recipe: a list, such as [8, 16, 32]; or a range as text, such as "1e-4..1e-2:log",
            "0..0.3" or "2..8". A range without ":log" is uniform; two whole numbers are a range of whole numbers.
        trials: Number of trials. Default: the whole grid of all lists, or 9 random trials if a setting has a range.
        reduction: Reduction factor: the best 1/`reduction` of the trials continue after each rung.
        rungs: Number of rungs; 1 trains all trials to the end. By default the last rung has one trial.
        workers: Commands that start runs on other machines, or "here" for this machine, as in `thrifty.compare`.

    The same call resumes an interrupted sweep.

    Raises UsageError if a setting is unknown, if held-out losses of trials are not comparable, or if the folder
    contains a different sweep. Raises ThriftyError if no trial is left.

    Example::

        found = thrifty.sweep(recipe, {"adamw.lr": "1e-4..1e-2:log", "data.batch": [8, 16, 32]}, budget="90 steps")
        print(found.table(), found.best_settings, found.best.loss)
    """
    chosen = {"trials": trials, "reduction": reduction, "rungs": rungs}
    settings = build(SweepSettings, {name: value for name, value in chosen.items() if value is not None}, "sweep")
    name = arguments.pop("name", None)
    base = recipe_from("sweep", recipe, arguments)
    launchers = read_workers(workers, "time" if base.budget.seconds else "steps")
    say = progress(quiet)
    content = run_sweep(
        base,
        read_space(over or {}, base),
        settings,
        Path(runs) / check_name(name or f"{base.name}-sweep", "--name"),
        workers=able_launchers(launchers, [base], say),
        say=say,
    )
    result = SweepResult(content, base.objects)
    result.write_page()
    return result
