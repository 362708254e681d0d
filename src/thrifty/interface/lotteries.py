"""`lottery`: find lottery tickets (sparse masks of an untrained network) by iterative magnitude pruning."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from rich.console import RenderableType

from thrifty.core.plain_values import build
from thrifty.core.recipe import Recipe
from thrifty.experiments.lottery_rounds import LotterySettings, run_lottery
from thrifty.interface.progress import progress
from thrifty.interface.recipe_arguments import RecipeArguments
from thrifty.interface.recipe_arguments import recipe as recipe_of
from thrifty.reporting.printed_result import PrintedResult, lines


@dataclass(frozen=True, repr=False)
class LotteryResult(PrintedResult):
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

    def __rich__(self) -> RenderableType:
        kinds = list(dict.fromkeys(kind for each in self.rounds for kind in each["runs"]))
        printed = [f"{'round':>5}  {'density':>8}" + "".join(f"  {kind:>12}" for kind in kinds)]
        for each in self.rounds:
            losses = [each["runs"].get(kind, {}).get("held_out_loss") for kind in kinds]
            shown = ["" if loss is None else f"{loss:.4f}" for loss in losses]
            printed.append(f"{each['round']:>5}  {each['density']:>8.4f}" + "".join(f"  {loss:>12}" for loss in shown))
        return lines(*printed, f"held-out losses; all results in {self.folder}/lottery.json")


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
    chosen = recipe_of(recipe=recipe, **arguments)
    settings, say = build(LotterySettings, values, "lottery"), progress(quiet)
    content = run_lottery(chosen, settings, Path(runs), origins=origins, quiet=quiet, say=say)
    return LotteryResult(content["rounds"], content["folder"], content)
