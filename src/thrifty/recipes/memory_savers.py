"""Techniques that reduce the memory of a run."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from thrifty.core.claims import Claim
from thrifty.core.errors import ThriftyError
from thrifty.core.recipe import Recipe
from thrifty.core.user_sources import is_function_name
from thrifty.recipes.recipe_layers import RecipeLayers

SAVERS = (
    "memory.recompute",
    "memory.offload_activations",
    "precision.mixed",
    "precision.optimizer_state:format=int8",
    "memory.offload_optimizer",
)
"""Values of `--with`, ordered by how much they change the results of a run: the first change them least."""


def leaner_start(recipe: Recipe, folder: Path, memory: float, check: Callable[[Recipe], object]) -> str:
    """Return advice: commands that reduce the memory of a run below `memory` bytes.

    `check` raises ThriftyError for a recipe that cannot be run.
    """
    model = recipe.model.build
    words = list(memory_savers(recipe, check))
    changes = [f"--with {word}" for word in words] + [f"--set data.batch={max(recipe.data.batch // 2, 1)}"]
    file, lean = shlex.quote(str(folder / "recipe.toml")), shlex.quote(f"{recipe.name}-lean")
    has_checkpoint = any((folder / "checkpoints").glob("step-*"))
    start = f"thrifty resume {shlex.quote(str(folder))} --fork" if has_checkpoint else f"thrifty train {file} --name"
    plan = f"thrifty plan {file} --memory {memory / 1e6:.0f}MB"
    if not model:
        return f"`{plan}` finds what fits; or `{start} {lean} {changes[0]}`; or instead {', '.join(changes[1:])}"
    advice = f"change the recipe of the call by one of {', '.join(changes)}"
    return f"`{plan} --model {model}` finds what fits; or {advice}" if is_function_name(model) else advice


def memory_savers(recipe: Recipe, check: Callable[[Recipe], object]) -> Iterator[str]:
    """Yield values of `--with` that save memory, more micro-batches first. Values are skipped if `check` refuses the
    changed recipe.
    """
    present = {technique.name for technique in recipe.techniques}
    parts = max((t.micro_batches for t in recipe.techniques if Claim.MICRO_BATCHES in t.claims), default=1)
    cuts = [f"{name}:micro_batches={2 * parts}" for name in ("gradient_accumulation", "gradient_cache")]
    words = [f"large_batch.{cut}" for cut in cuts if 2 * parts <= recipe.data.batch]
    for word in (*words, *(word for word in SAVERS if word.partition(":")[0] not in present)):
        try:
            leaner = RecipeLayers.above("", recipe).add_technique(word)
            check(leaner.recipe())
        except ThriftyError:
            continue
        if not leaner.replaced:
            yield word
