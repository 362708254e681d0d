"""The lottery: train, cut the smallest weights, rewind, and again; round after round by one call that can be stopped.

Paper     Frankle & Carbin 2019, The Lottery Ticket Hypothesis (arXiv 1803.03635); rewinding to an early step after
          Frankle et al. 2019 (arXiv 1903.01611).

Each round is an ordinary run, runs/NAME-round-0 (dense), -1, -2, …, under the masks of `sparsity.mask_from_file`;
controls are
runs beside it, such as runs/NAME-round-2-random-mask. Tickets and the state of the rounds stand in runs/NAME-lottery.
What is there already is not done again: the same call after a kill goes on, within a round as between two.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.old_names import rename_recipe
from thrifty.core.plain_values import differences, to_data
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.run_relative_settings import StepOrFraction, in_steps
from thrifty.core.secret_redaction import redact
from thrifty.core.setting_bounds import Positive, SettingBound, check_bounds, check_pattern
from thrifty.experiments.mask_export import masks_of
from thrifty.optim.mask_selection import masked_shapes
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.techniques.sparsity.mask_from_file import (
    MaskFromFile,
    Scope,
    density_of,
    mask_file_bytes,
    prune_by_magnitude,
)
from thrifty.training import checkpoint
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_setup import prepare_run
from thrifty.training.trainer import resume, rewind_run, train

Control = Literal["random-mask", "reinitialise"]
CONTROLS: tuple[Control, ...] = ("random-mask", "reinitialise")


@dataclass(frozen=True)
class LotterySettings:
    rounds: Positive = 8
    """Tickets that are drawn and trained, after the dense run."""
    prune: Annotated[float, SettingBound(above=0, below=1)] = 0.2
    """Share of the weights left that goes after each round."""
    rewind: StepOrFraction = 0
    """The step of the dense run that every ticket starts from: 0 for the first values, otherwise weights, optimizer,
    schedule and data order are those of that moment."""
    scope: Scope = "global"
    """Whether weights of all matrices are compared, or those of each by themselves."""
    where: str = r"\.\d+\."
    """Pattern of the names of the matrices that are pruned; those of numbered blocks by default."""
    half: str = r"(^|\.)(lm_)?head\."
    """Pattern of those among them that lose half the share, each by itself: output layers."""
    controls: tuple[Control, ...] = ()
    """What else is trained of each ticket: as many weights of each matrix at random places, or other first values."""
    seed: int = 0
    """Of the controls."""

    def __post_init__(self) -> None:
        check_bounds(self, "lottery")
        for name in ("where", "half"):
            check_pattern(self, "lottery", name)
        if self.rewind < 0 or (isinstance(self.rewind, float) and self.rewind >= 1):
            raise UsageError(
                f"lottery: rewind is {self.rewind}, which is no step before the last",
                fix="give a step, such as 50, or a share of the run below 1",
            )


def run_lottery(
    recipe: Recipe,
    lottery: LotterySettings,
    runs: Path = Path("runs"),
    *,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """All rounds to the end; returns what stands in runs/NAME-lottery/lottery.json. `status` is "interrupted", and
    `exit_code` the signal's, when a round was stopped by one.

    Raises UsageError where the folder is of another lottery: only
    `rounds` and `controls` may differ, for more of them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("a lottery starts its rounds itself, from one process", fix="start it without torchrun")
    if (steps := recipe.budget.steps) and in_steps(lottery.rewind, steps) >= steps:
        raise UsageError(
            f"tickets cannot start at step {in_steps(lottery.rewind, steps)} of {steps}",
            fix="rewind to an earlier step",
        )
    if not (Path(runs) / f"{recipe.name}-round-0").exists():  # nothing has been spent yet
        _refuse_nothing_to_prune(recipe, lottery, quiet)
    with _claimed(Path(runs) / f"{recipe.name}-lottery", recipe, lottery) as folder:
        return _Rounds(recipe, lottery, Path(runs), folder, dict(origins or {}), quiet, say).to_the_end()


def _refuse_nothing_to_prune(recipe: Recipe, lottery: LotterySettings, quiet: bool) -> None:
    """Also what no ticket can go with. The model that is built to see it is let go again."""
    dense = replace(recipe, techniques=(*recipe.techniques, MaskFromFile()))
    built = prepare_run(dense, steps=recipe.budget.steps or 1000, quiet=quiet).run.build_model()
    _chosen(dict(built.named_parameters()), lottery, f"the model of {recipe.name}")


def next_mask_file(run: Path, step: int, lottery: LotterySettings) -> tuple[bytes, float]:
    """The next ticket, as its file has it, and its density: of the weights that a run had after this step, and of those
    that its masks keep. Raises UsageError where no matrix has a name that matches `where`."""
    tensors = checkpoint.load(run / "checkpoints", step).tensors
    now = masks_of(tensors)
    parameters = {
        name.removeprefix("parameters/"): tensor for name, tensor in tensors.items() if name.startswith("parameters/")
    }
    weights = _chosen(parameters, lottery, f"{run}")
    masks = {name: now.get(name, torch.ones_like(weight, dtype=torch.bool)) for name, weight in weights.items()}
    half = {name for name in weights if re.search(lottery.half, name)}
    new = prune_by_magnitude(weights, masks, lottery.prune, lottery.scope, half)
    return mask_file_bytes(new, f"after step {step} of {run.name}", weights), density_of(new)


def _chosen(parameters: Mapping[str, Tensor], lottery: LotterySettings, owner: str) -> dict[str, Tensor]:
    """The matrices that are pruned."""
    matrices = {name: parameters[name] for name in masked_shapes(parameters) if re.search(lottery.where, name)}
    if not matrices:
        raise UsageError(f"no matrix of {owner} has a name that matches {lottery.where!r}", fix="--where PATTERN")
    return matrices


@contextmanager
def _claimed(path: Path, recipe: Recipe, lottery: LotterySettings) -> Iterator[RunFolder]:
    """The folder of the lottery, new or of an earlier part of the same, locked."""
    meant = {"recipe": recipe_to_data(recipe), "lottery": to_data(lottery)}
    is_there = (path / "lottery.json").is_file()
    if not is_there and (first := path.parent / f"{recipe.name}-round-0").exists():
        raise UsageError(
            f"{first} is there already, and {path} does not say of what lottery", fix="give another --name"
        )
    with RunFolder(path).lock() if is_there else RunFolder.create(path) as folder:
        before = folder.read_json("lottery") if is_there else {}
        if "recipe" in before:
            before["recipe"] = rename_recipe(before["recipe"])
        if other := differences(_binding(redact(before)), _binding(redact(meant))) if before else []:
            raise UsageError(
                f"{path} is another lottery: " + "; ".join(other), fix="undo the change, or give another --name"
            )
        folder.write_json("lottery", {**before, **meant})
        yield folder


def _binding(definition: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in definition["lottery"].items() if name not in ("rounds", "controls")}
    return {"recipe": definition["recipe"], "lottery": settings}


@dataclass
class _Rounds:
    recipe: Recipe
    lottery: LotterySettings
    runs: Path
    folder: RunFolder
    origins: dict[str, str]
    quiet: bool
    say: Callable[[str], None]

    def to_the_end(self) -> dict[str, Any]:
        rounds: list[dict[str, Any]] = []
        density = 1.0
        for number in range(self.lottery.rounds + 1):
            if number:
                density = self.draw(number)
            rounds.append({"round": number, "density": density, "runs": {}})
            for control in ("", *CONTROLS) if number else ("",):
                summary = self.finished(number, control)
                if summary is None and control and control not in self.lottery.controls:
                    continue
                summary = summary or self.round(number, control)
                if summary["status"] != "finished":
                    return self.tell(rounds, summary["status"], summary["exit_code"])
                rounds[-1]["runs"][control or "ticket"] = {
                    "run": self.name(number, control),
                    **{name: summary[name] for name in ("held_out_loss", "steps", "tokens")},
                }
                self.tell(rounds, "running")
        return self.tell(rounds, "finished")

    def tell(self, rounds: list[dict[str, Any]], status: str, exit_code: int = 0) -> dict[str, Any]:
        result = self.folder.read_json("lottery") | {"rounds": rounds, "status": status, "exit_code": exit_code}
        self.folder.write_json("lottery", result)
        return result | {"folder": str(self.folder.path)}

    def name(self, number: int, control: str = "") -> str:
        return f"{self.recipe.name}-round-{number}" + (f"-{control}" if control else "")

    def path(self, number: int) -> Path:
        return self.runs / self.name(number)

    def ticket(self, number: int) -> Path:
        return self.folder.path.resolve() / f"round-{number}.safetensors"

    @property
    def steps(self) -> int:
        """Of the dense run, and so of all."""
        return checkpoint.find(self.path(0) / "checkpoints").scalars["steps"]

    def draw(self, number: int) -> float:
        """The ticket of a round, where it was not drawn already; drawn again it is the same."""
        content, density = next_mask_file(self.path(number - 1), self.steps, self.lottery)
        if not self.ticket(number).is_file():
            AtomicFiles().swap(self.ticket(number), content)
        return density

    def finished(self, number: int, control: str) -> dict[str, Any] | None:
        """The summary of a run that is finished."""
        with suppress(IntegrityError):
            summary = RunFolder(self.runs / self.name(number, control)).read_json("summary")
            return summary if summary["status"] == "finished" else None
        return None

    def round(self, number: int, control: str) -> dict[str, Any]:
        """The summary of a run of this round, once it is trained or was stopped."""
        name, recipe = self.name(number, control), self.recipe
        path = self.runs / name
        self.say(f"round {number} of {self.lottery.rounds}: {name}")
        options = {"origins": self.origins, "quiet": self.quiet}
        if number == 0:
            kept = replace(recipe.checkpoints, extra_steps=(*recipe.checkpoints.extra_steps, self.lottery.rewind))
            recipe = replace(recipe, name=name, checkpoints=kept, techniques=(*recipe.techniques, MaskFromFile()))
        else:
            file = self.ticket(number)
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            ticket = MaskFromFile(file=str(file), sha256=sha256, control=control, seed=self.lottery.seed)  # type: ignore[arg-type]
            budget = Budget(steps=self.steps)
            recipe = replace(recipe, name=name, budget=budget, techniques=(*recipe.techniques, ticket))
            start = in_steps(self.lottery.rewind, self.steps)
            if start and control != "reinitialise":
                return rewind_run(self.path(0), start, recipe, **options)
        if (path / "recipe.toml").is_file():
            return resume(path, recipe, **options)
        return train(recipe, self.runs, **options)
