"""Runs that only pretend: their folders hold what a run's would, and training them takes a millisecond."""

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thrifty.comparing.equal_budgets import StepCost
from thrifty.comparing.run_launchers import RunExit
from thrifty.comparing.variants import Variant, variants_of
from thrifty.core.recipe import Recipe
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.recipes.typed_variants import read_variants
from thrifty.recipes.vision_recipes import vit_digits
from thrifty.training.time_budget import AIM

PEAK = 1e9


def variants(*texts: str, steps: int = 100) -> tuple[Variant, ...]:
    """Arms against the recipe for digits, with so many steps as its budget."""

    def lay(name: str = "vit-digits") -> RecipeLayers:
        assert name == "vit-digits"
        return RecipeLayers.above("recipe", vit_digits()).replace("--budget", "budget", {"steps": steps})

    return variants_of(lay().recipe(), read_variants(texts, lambda name: lay(name).recipe()))


@dataclass
class Simulated:
    """Starts runs that end at once. The loss is that of the seed, changed by what the recipe is."""

    effect: Callable[[Recipe], float] = lambda recipe: 0.0
    """Relative change of the loss."""
    step_time: Callable[[Recipe], float] = lambda recipe: 0.01
    slows: Callable[[Recipe], float] = lambda recipe: 1.0
    """Factor of the step times that a run did not foresee."""
    spread: float = 0.02
    """Relative spread of the losses of pairs."""
    label_entropy: Callable[[Recipe], float] = lambda recipe: 2.3
    fails: Collection[str] = ()
    """Runs that fail at their end."""
    breaks: Collection[str] = ()
    """Runs that fail before their first step; "variant-1-count" is counted."""
    varies: Callable[[Recipe], bool] = lambda recipe: False
    """True if the FLOPs of a step change over the run."""
    stops_at: str = ""
    """The run that is interrupted, once."""
    processor: str = "one"
    started: list[str] = field(default_factory=list)
    stopped: bool = False

    def __call__(self, recipe: Recipe, runs: Path) -> RunExit:
        self.started.append(recipe.name)
        if recipe.name in self.breaks:
            return RunExit(1, "out of memory", 1.0, None)
        if recipe.name == self.stops_at:
            self.stops_at = ""
            return RunExit(143, "", 1.0, None)
        self.write(recipe, runs / recipe.name)
        if recipe.name in self.fails:
            return RunExit(1, "the loss was not finite", 1.0, None)
        return RunExit(0, "", 1.0, 50.0)

    def count(self, recipe: Recipe, runs: Path) -> tuple[RunExit, StepCost | None]:
        if recipe.name in self.breaks:
            return RunExit(2, "the model has no blocks", 1.0, None), None
        batch, judged_on = recipe.data.batch, {"label_entropy": self.label_entropy(recipe)}
        cost = StepCost(self.steps(recipe), batch, 1e6 * batch, self.varies(recipe), judged_on)
        return RunExit(0, "", 1.0, None), cost

    def steps(self, recipe: Recipe) -> int:
        """Return the number of steps of a run, which adapts to its budget in seconds."""
        budget = recipe.budget
        if budget.tokens is not None:
            return int(budget.tokens // recipe.data.batch)
        return budget.steps or int(AIM * (budget.seconds or 0) / self.step_time(recipe) + 1e-6)

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        pass

    def loss(self, recipe: Recipe) -> float:
        trained = replace(recipe, evaluation=replace(recipe.evaluation, batch=None))
        plain = write_recipe(trained).split("\n", 1)[1].encode()  # all but its name
        own = np.random.default_rng(int.from_bytes(hashlib.sha256(plain).digest()[:8], "big"))
        shared = np.random.default_rng(recipe.seed % 1000)
        return 2 + 0.1 * shared.normal() + 2 * (self.effect(recipe) + self.spread * own.normal())

    def write(self, recipe: Recipe, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        steps, loss, seconds = self.steps(recipe), self.loss(recipe), self.step_time(recipe) * self.slows(recipe)
        records = [
            {
                "kind": "step",
                "step": step,
                "tokens": step * recipe.data.batch,
                "step_seconds": seconds * (50 if step == 1 else 1),  # something is compiled
                "learning_rate": 1.0 - step / steps,
            }
            for step in range(1, steps + 1)
        ]
        every = recipe.evaluation.every
        records += [
            {"kind": "evaluation", "step": step, "loss": loss * (1 + (steps - step) / steps), "accuracy": step / steps}
            for step in (*range(every, steps, every), steps)
        ]
        (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        explanation = {"footprint": {"flops": 1e6 * recipe.data.batch}, "parameters": 1000}
        summary = {
            "status": "finished",
            "steps": steps,
            "tokens": steps * recipe.data.batch,
            "seconds": (steps + 49) * seconds,
            "held_out_loss": loss,
            "held_out": {"accuracy": 1 - loss / 10},
            "peak_memory": 1e6,
            "label_entropy": self.label_entropy(recipe),
            "peak_flops_per_second": PEAK,
        }
        files = {
            "explanation": explanation,
            "summary": summary,
            "environment": {"device": "cpu", "cpu": self.processor},
        }
        for name, value in files.items():
            (folder / f"{name}.json").write_text(json.dumps(value))


def by_kind(result, kind: str) -> list[dict]:
    return [entry for entry in result["runs"] if kind in entry]
