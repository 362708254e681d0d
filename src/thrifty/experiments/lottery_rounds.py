"""Lottery tickets by iterative magnitude pruning: train, prune the smallest weights, rewind, repeat.

Paper     Frankle & Carbin 2019, The Lottery Ticket Hypothesis (arXiv 1803.03635). Rewinding to an early step follows
          Frankle et al. 2019 (arXiv 1903.01611).

Each round is an ordinary run with the masks of `sparsity.mask_from_file`: runs/NAME-round-0 (dense), -1, -2, ….
Controls are additional runs, such as runs/NAME-round-2-random-mask. Tickets and the state of the rounds are in
runs/NAME-lottery. Finished work is never repeated. After a kill, the same call resumes, also in the middle of a round.
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
from thrifty.training.checkpoint_index import checkpoints, step_of
from thrifty.training.input_identity import input_identity, refuse_changed_inputs
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_setup import prepare_run
from thrifty.training.trainer import resume, rewind_run, train

Control = Literal["random-mask", "reinitialise"]
CONTROLS: tuple[Control, ...] = ("random-mask", "reinitialise")
NEAR = 0.2
"""Maximum fraction of the dense run between the wanted start of tickets and the checkpoint that replaces it."""


@dataclass(frozen=True)
class LotterySettings:
    rounds: Positive = 8
    """Number of tickets to prune and train after the dense run."""
    prune: Annotated[float, SettingBound(above=0, below=1)] = 0.2
    """Fraction of the remaining weights that each round prunes."""
    rewind: StepOrFraction = 0
    """Step of the dense run from which every ticket starts. 0 is the initialization. Any other step restores the
    weights, the optimizer, the schedule and the data order of that step.
    """
    scope: Scope = "global"
    """"global" ranks the weights of all matrices together; "layerwise" ranks the weights of each matrix separately."""
    where: str = r"\.\d+\."
    """Regular expression for the names of matrices to prune; by default the matrices of numbered blocks."""
    half: str = r"(^|\.)(lm_)?head\."
    """Regular expression for output layers. They are pruned by half of `prune`, and the weights of each are ranked
    separately.
    """
    controls: tuple[Control, ...] = ()
    """Control runs for each ticket. "random-mask" is a random mask with the same density per matrix; "reinitialise" is
    the ticket's mask with another initialization.
    """
    seed: int = 0
    """Seed of the controls."""

    def __post_init__(self) -> None:
        check_bounds(self, "lottery")
        for name in ("where", "half"):
            check_pattern(self, "lottery", name)
        if self.rewind < 0 or (isinstance(self.rewind, float) and self.rewind >= 1):
            raise UsageError(
                f"lottery: rewind is '{self.rewind}', but must be a step before the last step",
                fix="set a step, such as 50, or a fraction of the run below 1",
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
    """Run all rounds and return the content of runs/NAME-lottery/lottery.json.

    If a signal stops a round, `status` is "interrupted" and `exit_code` is the exit code of that signal. Raises
    UsageError if the folder holds a different lottery. Between calls, only `rounds` and `controls` may change; both may
    only grow.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "a lottery starts its rounds itself, from one process", fix="start the lottery without torchrun"
        )
    if (steps := recipe.budget.steps) and in_steps(lottery.rewind, steps) >= steps:
        raise UsageError(
            f"tickets cannot start at step {in_steps(lottery.rewind, steps)} of {steps}",
            fix="rewind to an earlier step",
        )
    if not (Path(runs) / f"{recipe.name}-round-0").exists():  # no compute has been spent yet
        _require_prunable_matrices(recipe, lottery, quiet)
    inputs = input_identity({recipe.name: recipe}, say)
    with _open_lottery(Path(runs) / f"{recipe.name}-lottery", recipe, lottery, inputs, say) as folder:
        return _Rounds(recipe, lottery, Path(runs), folder, dict(origins or {}), quiet, say).run_all()


def _require_prunable_matrices(recipe: Recipe, lottery: LotterySettings, quiet: bool) -> None:
    """Raise UsageError if no matrix name matches `where`, or if a technique of the recipe cannot be combined with
    masks.

    The model is built only for this check.
    """
    dense = replace(recipe, techniques=(*recipe.techniques, MaskFromFile()))
    built = prepare_run(dense, steps=recipe.budget.steps or 1000, quiet=quiet).run.build_model()
    _prunable_matrices(dict(built.named_parameters()), lottery, f"the model of {recipe.name}")


def next_mask_file(run: Path, step: int, lottery: LotterySettings) -> tuple[bytes, float]:
    """Return the file content and the density of the next ticket.

    The next ticket prunes only weights that the masks of `run` keep after step `step`. Raises UsageError if no matrix
    name matches `where`.
    """
    tensors = checkpoint.load(run / "checkpoints", step).tensors
    now = masks_of(tensors)
    parameters = {
        name.removeprefix("parameters/"): tensor for name, tensor in tensors.items() if name.startswith("parameters/")
    }
    weights = _prunable_matrices(parameters, lottery, f"{run}")
    masks = {name: now.get(name, torch.ones_like(weight, dtype=torch.bool)) for name, weight in weights.items()}
    half = {name for name in weights if re.search(lottery.half, name)}
    new = prune_by_magnitude(weights, masks, lottery.prune, lottery.scope, half)
    return mask_file_bytes(new, f"after step {step} of {run.name}", weights), density_of(new)


def _prunable_matrices(parameters: Mapping[str, Tensor], lottery: LotterySettings, owner: str) -> dict[str, Tensor]:
    matrices = {name: parameters[name] for name in masked_shapes(parameters) if re.search(lottery.where, name)}
    if not matrices:
        raise UsageError(f"no matrix of {owner} has a name that matches {lottery.where!r}", fix="--where PATTERN")
    return matrices


@contextmanager
def _open_lottery(
    path: Path, recipe: Recipe, lottery: LotterySettings, inputs: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[RunFolder]:
    """Yield the locked folder of the lottery. It is new, or belongs to an interrupted lottery with equal settings and
    equal inputs.
    """
    definition = {"recipe": recipe_to_data(recipe), "lottery": to_data(lottery)}
    is_there = (path / "lottery.json").is_file()
    if not is_there and (first := path.parent / f"{recipe.name}-round-0").exists():
        raise UsageError(f"'{first}' exists, but '{path}' has no lottery.json", fix="choose another --name")
    with RunFolder(path).lock() if is_there else RunFolder.create(path) as folder:
        saved = folder.read_json("lottery") if is_there else {}
        if "recipe" in saved:
            saved["recipe"] = rename_recipe(saved["recipe"])
        if other := differences(_binding(redact(saved)), _binding(redact(definition))) if saved else []:
            raise UsageError(
                f"'{path}' holds a lottery with different settings: " + "; ".join(other),
                fix="undo the change; or choose another --name",
            )
        is_finished = saved.get("status") == "finished" and saved["lottery"] == definition["lottery"]
        refuse_changed_inputs(path, saved.get("inputs", {}), inputs, say, is_finished)
        folder.write_json("lottery", {"inputs": inputs, **saved, **definition})
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

    def run_all(self) -> dict[str, Any]:
        rounds: list[dict[str, Any]] = []
        density = 1.0
        for number in range(self.lottery.rounds + 1):
            if number:
                density = self.prune(number)
            rounds.append({"round": number, "density": density, "runs": {}})
            for control in ("", *CONTROLS) if number else ("",):
                summary = self.finished_summary(number, control)
                if summary is None and control and control not in self.lottery.controls:
                    continue
                summary = summary or self.train_round(number, control)
                if summary["status"] != "finished":
                    return self.write_state(rounds, summary["status"], summary["exit_code"])
                rounds[-1]["runs"][control or "ticket"] = {
                    "run": self.name(number, control),
                    **{name: summary[name] for name in ("held_out_loss", "steps", "tokens")},
                }
                self.write_state(rounds, "running")
        return self.write_state(rounds, "finished")

    def write_state(self, rounds: list[dict[str, Any]], status: str, exit_code: int = 0) -> dict[str, Any]:
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
        """Number of steps of the dense run, and therefore of every run."""
        return checkpoint.find(self.path(0) / "checkpoints").scalars["steps"]

    def start(self) -> int:
        """Return the step of the dense run from which tickets start. A budget in seconds changes the number of steps of
        a run, so that a fraction of the run may have no checkpoint. The nearest checkpoint then replaces it, if it is
        near.
        """
        wanted = in_steps(self.lottery.rewind, self.steps)
        if not wanted or isinstance(self.lottery.rewind, int):
            return wanted
        saved = [step for step in map(step_of, checkpoints(self.path(0) / "checkpoints")) if step < self.steps]
        start = min(saved, key=lambda step: abs(step - wanted), default=wanted)
        if start == wanted or abs(start - wanted) > NEAR * self.steps:
            return wanted
        self.say(f"tickets start from step {start}, the checkpoint nearest to step {wanted} of {self.steps}")
        return start

    def prune(self, number: int) -> float:
        """Return the density of a round's ticket; write the ticket if its file is missing. Repeated calls yield the
        same ticket.
        """
        content, density = next_mask_file(self.path(number - 1), self.steps, self.lottery)
        if not self.ticket(number).is_file():
            AtomicFiles().swap(self.ticket(number), content)
        return density

    def finished_summary(self, number: int, control: str) -> dict[str, Any] | None:
        """Return the summary of a round's run, or None if the run has not finished."""
        with suppress(IntegrityError):
            summary = RunFolder(self.runs / self.name(number, control)).read_json("summary")
            return summary if summary["status"] == "finished" else None
        return None

    def train_round(self, number: int, control: str) -> dict[str, Any]:
        """Train or resume one run of a round and return its summary."""
        name = self.name(number, control)
        recipe = replace(self.recipe, evaluation=replace(self.recipe.evaluation, patience=None))  # equal lengths
        path = self.runs / name
        self.say(f"round {number} of {self.lottery.rounds}: {name}")
        options = {"origins": self.origins, "quiet": self.quiet}
        if number == 0:
            checkpoints = replace(
                recipe.checkpoints, extra_steps=(*recipe.checkpoints.extra_steps, self.lottery.rewind)
            )
            recipe = replace(
                recipe, name=name, checkpoints=checkpoints, techniques=(*recipe.techniques, MaskFromFile())
            )
        else:
            file = self.ticket(number)
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            ticket = MaskFromFile(file=str(file), sha256=sha256, control=control, seed=self.lottery.seed)  # type: ignore[arg-type]
            budget = Budget(steps=self.steps)
            recipe = replace(recipe, name=name, budget=budget, techniques=(*recipe.techniques, ticket))
            if control != "reinitialise" and (start := self.start()):
                return rewind_run(self.path(0), start, recipe, **options)
        if (path / "recipe.toml").is_file():
            return resume(path, recipe, **options)
        return train(recipe, self.runs, **options)
