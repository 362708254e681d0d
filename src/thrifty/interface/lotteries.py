"""`lottery`: find lottery tickets (sparse masks of an untrained network) by iterative magnitude pruning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

import altair as alt
from rich.console import RenderableType

from thrifty.core.plain_values import build
from thrifty.core.recipe import Recipe
from thrifty.experiments.lottery_rounds import LotterySettings, run_lottery
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.measured_result import MeasuredResult, Rows
from thrifty.reporting.number_format import percent, significant
from thrifty.reporting.printed_result import ResultTable, lines
from thrifty.reporting.result_page import BAD, GOOD, PHONE, PageVerdict, ResultPage, page_chart
from thrifty.reporting.run_tables import TextTable
from thrifty.training.run_folder import RunFolder

DENSE = "ticket"
"""Kind of the runs of the lottery itself. The ticket of round 0 is the dense network."""
LOWER = 0.01
"""Relative difference of held-out losses up to which a ticket is as good as the dense network."""


@dataclass(frozen=True, repr=False)
class LotteryResult(MeasuredResult):
    """Held-out losses of all rounds, and the folder of the lottery tickets."""

    rounds: Sequence[Mapping[str, Any]]
    folder: str
    content: Mapping[str, Any]
    """Content of lottery.json."""

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.content["exit_code"]

    def as_dict(self) -> dict[str, Any]:
        return dict(self.content)

    @property
    def page(self) -> Path:
        """HTML page of the lottery."""
        return Path(self.folder) / "report.html"

    def rows(self) -> Rows:
        return [
            {"round": each["round"], "density": each["density"], "kind": kind, **run}
            for each in self.rounds
            for kind, run in each["runs"].items()
        ]

    def charts(self) -> dict[str, Mapping[str, Any]]:
        """Return the chart "density": the held-out loss of tickets and controls by density."""
        return {"density": self._by_density(640).to_dict()} if self.rows() else {}

    def _by_density(self, width: int) -> alt.Chart:
        points = self.rows()
        kinds = list(dict.fromkeys(point["kind"] for point in points))
        colours = [css_variable(name) for name in ("train", "held-out", "trained")]
        legend = alt.Legend(title=None, orient="top", columns=1 if width <= PHONE else 3)
        scale = alt.Scale(type="log", nice=False, padding=12, reverse=True)
        chart = alt.Chart(alt.Data(values=points)).mark_line(point=True).encode(
            x=alt.X("density:Q", title="density", scale=scale, axis=alt.Axis(format=".2~g", tickCount=6)),
            y=alt.Y("held_out_loss:Q", title="held-out loss", scale=alt.Scale(zero=False, padding=12)),
            color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=colours[: len(kinds)]), legend=legend),
        )  # fmt: skip
        return chart.properties(width=width, height=320 if width > PHONE else 240)

    def table(self) -> ResultTable:
        """Return a table with the density and the held-out losses of each round."""
        kinds = list(dict.fromkeys(row["kind"] for row in self.rows()))
        rows = []
        for each in self.rounds:
            losses = [each["runs"].get(kind, {}).get("held_out_loss") for kind in kinds]
            rows.append([str(each["round"]), f"{each['density']:.4f}", *(significant(loss, 4) for loss in losses)])
        return ResultTable(["round", "density", *(f"{kind}, held-out loss" for kind in kinds)], rows)

    def render(self) -> str:
        """Return the HTML page with the smallest equal ticket, the losses by density and the table of rounds."""
        table, status = self.table(), self.content.get("status", "running")
        caption = "The dense network is at density 1. Controls have the density of the ticket of the same round."
        return ResultPage(
            kind="lottery",
            name=Path(self.folder).name,
            status=status,
            about="Lottery tickets by iterative magnitude pruning: train, prune the smallest weights, rewind, repeat.",
            verdicts=self._verdicts() if status == "finished" else [],
            pending=f"The lottery is {status}.",
            charts=[page_chart("Held-out loss by density", caption, self._by_density)] if self.rows() else [],
            tables=[TextTable("Rounds", table.head, table.rows, frozenset(range(len(table.head))))],
            source="All values are in lottery.json in the same folder; each round has its own run folder.",
        ).render()

    def _verdicts(self) -> list[PageVerdict]:
        losses = {row["density"]: row["held_out_loss"] for row in self.rows() if row["kind"] == DENSE}
        known = {density: loss for density, loss in losses.items() if loss is not None}
        if 1.0 not in known or len(known) < 2:
            return []
        most = known[1.0] + LOWER * abs(known[1.0])  # a loss may be negative
        equal = min(density for density, loss in known.items() if loss <= most)
        sentence = f"Held-out loss {significant(known[equal], 4)}; the dense network has {significant(known[1.0], 4)}."
        note = f"Equal means at most {percent(LOWER, 0)} higher, in one seed."
        if equal == 1.0:
            return [PageVerdict("No ticket is as good as the dense network", sentence, note, BAD)]
        return [
            PageVerdict(f"A ticket with {percent(equal)} of the weights equals the dense network", sentence, note, GOOD)
        ]

    def __rich__(self) -> RenderableType:
        return lines(self.table(), f"tickets in {self.folder}", str(self.page))


def open_lottery(folder: Path) -> LotteryResult:
    """Write the page of a lottery's folder, and return the result."""
    content = {"exit_code": 0, "rounds": [], **RunFolder(folder).read_json("lottery"), "folder": str(folder)}
    result = LotteryResult(content["rounds"], content["folder"], content)
    RunFolder(folder).write_text(result.page.name, result.render())
    return result


def lottery(
    recipe: Recipe | str | Path | None = None,
    *,
    rounds: int = LotterySettings.rounds,
    prune_fraction: float = LotterySettings.prune,
    rewind: int | float = LotterySettings.rewind,
    scope: Literal["global", "layerwise"] = LotterySettings.scope,
    where: str = LotterySettings.where,
    half_rate: str = LotterySettings.half,
    controls: Sequence[Literal["random-mask", "reinitialise"]] = (),
    runs: str | Path = "runs",
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> LotteryResult:
    """Find lottery tickets: train, prune the smallest weights, rewind the remaining weights, and repeat.

    A ticket is the mask and the rewound weights. Weights are rewound to their initial values or to an early step. Each
    round is a run folder, `runs`/NAME-round-R.

    Args:
        recipe: A recipe, its name or its file. `arguments` are as in `thrifty.recipe`.
        prune_fraction: Fraction of the remaining weights to prune in each round.
        rewind: Step (or fraction of the run) at which weights are saved. Remaining weights are reset to these values.
        scope: "global" compares magnitudes over all matrices, "layerwise" within each matrix.
        where: Pattern of the names of the weight matrices to prune.
        half_rate: Pattern of the names of weight matrices whose prune fraction is halved.
        controls: Control runs to train for each ticket: "random-mask" or "reinitialise".

    The same call resumes an interrupted lottery, also with more rounds or controls. Raises UsageError if the folder
    contains a different lottery.

    Example::

        print(thrifty.lottery(recipe, rounds=3, prune_fraction=0.5))
    """
    values = {"rounds": rounds, "prune": prune_fraction, "rewind": rewind, "scope": scope}
    values |= {"where": where, "half": half_rate, "controls": tuple(controls)}
    chosen = recipe_from("lottery", recipe, arguments)
    settings, say = build(LotterySettings, values, "lottery"), progress(quiet)
    content = run_lottery(chosen, settings, Path(runs), origins=origins, quiet=quiet, say=say)
    result = LotteryResult(content["rounds"], content["folder"], content)
    RunFolder(Path(result.folder)).write_text(result.page.name, result.render())
    return result
