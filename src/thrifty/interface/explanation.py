"""`explain`: show the effect of each technique of a recipe in order, with predicted memory and FLOPs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, Unpack

from rich.console import RenderableType

from thrifty.composition.compose import Run
from thrifty.composition.explain import Explanation, resident_bytes, touched_modules
from thrifty.composition.explain import explain as explain_run
from thrifty.core.errors import RefusedError
from thrifty.core.plain_values import write_size
from thrifty.core.recipe import Recipe
from thrifty.distributed.fake_ranks import fake_rank, ranks_of_stages
from thrifty.interface.recipe_arguments import RecipeArguments, recipe_from
from thrifty.reporting.number_format import scaled
from thrifty.reporting.printed_result import PrintedResult, lines, open_table
from thrifty.training.memory_meter import MemoryMeter, kept_bytes
from thrifty.training.rank_setup import mesh_sizes
from thrifty.training.run_setup import prepare_run

STEPS = 1000
"""Assumed number of steps, if the budget of a run is not in steps."""
PARTS = ("parameters", "buffers", "gradients", "optimizer", "activations")
Found = TypeVar("Found")


@dataclass(frozen=True, repr=False)
class RecipeExplanation(PrintedResult):
    """Effects of a recipe. Techniques are in order of stage, each with memory and FLOPs before and after it."""

    recipe: str
    data: Mapping[str, Any]
    explanation: Explanation
    notes: Mapping[str, Any]
    """Modules that each technique changed or skipped."""
    refused: Mapping[str, str]
    """Techniques that do not support the model or the data, with the reasons."""
    process: float
    """Bytes of the process before the model is built."""
    kept: float = 0.0
    """Expected bytes of kernels' workspaces and of freed blocks that the process keeps."""
    ranks: Mapping[str, Any] = field(default_factory=dict)
    """The "mesh", and under "stages" the contents of one rank of each pipeline stage. Empty without a mesh."""
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """Predicted maximum number of bytes of all tensors during a step."""
        return self.explanation.footprint.memory

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 2 if self.refused else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "data": dict(self.data),
            **self.explanation.as_dict(self.notes),
            **self.ranks,
            "process": self.process,
            "kept": self.kept,
            "refused": dict(self.refused),
            "origins": dict(self.origins),
        }

    def __rich__(self) -> RenderableType:
        facts = self.as_dict()
        total = facts["footprint"]
        parts = ", ".join(f"{name} {write_size(total[name])}" for name in PARTS)
        printed = [f"{self.recipe}: {facts['parameters']:,} parameters, {_in_words(facts['data'])}\n"]
        printed += [f"refused {name}: {reason.partition(': ')[2]}" for name, reason in self.refused.items()]
        places = {
            "of the process before the model is built": self.process,
            "of tensors": total["memory"],
            "of kernels and freed blocks": self.kept,
        }
        sizes = ", ".join(f"{write_size(size)} {place}" for place, size in places.items() if size)
        below = [
            f"\npredicted memory at the peak {write_size(sum(places.values()))}: {sizes}",
            f"tensors: {parts}, temporary {write_size(total['temporary'])}",
        ]
        if self.ranks:
            below += _rank_lines(facts)
        if facts["decisions"]:
            below += ["\nsettings that depend on the first batch", *(f"  {each}" for each in facts["decisions"])]
        if self.origins:
            below += ["\nsettings that differ from the defaults"]
            below += [f"  {path}  from {origin}" for path, origin in self.origins.items()]
        return lines(*printed, _table(facts), *below)


def explain(
    recipe: Recipe | str | Path | None = None,
    *,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
    **arguments: Unpack[RecipeArguments],
) -> RecipeExplanation:
    """Explain a recipe: the modules that each technique changes, memory and FLOPs before and after it, and refusals.

    `recipe` is a recipe, its name or its file. `arguments` are as in `thrifty.recipe`. `origins` contains the origin
    of each value, for printing. Nothing is trained. With a mesh, the result contains the memory, computation and
    communication of each rank. No ranks are started.

    Raises UsageError if the recipe cannot be trained, and RefusedError if the model itself is refused.

    Example::

        explanation = thrifty.explain(recipe)
        print(explanation, explanation.peak, explanation.refused)
    """
    recipe = recipe_from("explain", recipe, arguments)
    prepared = prepare_run(recipe, steps=recipe.budget.steps or STEPS, quiet=quiet)
    run, refused, places = prepared.run, {}, {}
    if (count := recipe.mesh.least_ranks) > 1:
        sizes, stages = mesh_sizes(recipe, count), []
        for ranks in ranks_of_stages(sizes):
            with fake_rank(ranks[0], sizes):
                run, also_refused, stage = _without_refused(run, resident_bytes)
            refused |= also_refused
            stages.append({"ranks": [*ranks], **vars(stage)})
        with fake_rank(0, sizes):
            explanation = explain_run(run)
        notes, places = stages[0]["notes"], {"mesh": sizes, "stages": stages}
    else:
        run, refused, notes = _without_refused(run, touched_modules)
        explanation = explain_run(run)
    process = MemoryMeter(run.device).process
    kept = kept_bytes(run.device, run.techniques, explanation.footprint.activations)
    data = prepared.data.description()
    return RecipeExplanation(recipe.name, data, explanation, notes, refused, process, kept, places, origins or {})


def _without_refused(run: Run, look: Callable[[Run], Found]) -> tuple[Run, dict[str, str], Found]:
    """Return a run without the techniques that refuse its model, the reasons of these techniques, and the result of
    `look`. Raise RefusedError if the model itself is refused.
    """
    refused: dict[str, str] = {}
    while True:
        try:
            return run, refused, look(run)
        except RefusedError as reason:
            name = reason.what.partition(":")[0]
            if name not in (technique.name for technique in run.techniques):
                raise
            refused[name] = str(reason)
            run = replace(run, techniques=tuple(t for t in run.techniques if t.name != name), notes={})


def _table(facts: Mapping[str, Any]) -> RenderableType:
    table = open_table("stage", "technique", "numerics", "touched", "tensors", "activations", "FLOPs")
    table.add_row("", "plain run", "", "", *_amounts(facts["plain"]))
    for row in facts["techniques"]:
        touched = "; ".join(row["touched"])
        table.add_row(row["stage"], row["name"], row["numerics"], touched, *_amounts(row["after"]))
    return table


def _amounts(footprint: Mapping[str, float]) -> tuple[str, str, str]:
    return write_size(footprint["memory"]), write_size(footprint["activations"]), scaled(footprint["flops"])


def _in_words(data: Mapping[str, Any]) -> str:
    if "train_images" in data:
        side, channels = data["side"], data["channels"]
        left_out = f", {data['left_out']:,} files left out" if data["left_out"] else ""
        images = f"{data['train_images']:,} training images of {side} x {side} x {channels}"
        if "train_captions" in data:
            return f"{images} with {data['train_captions']:,} captions, vocabulary {data['vocabulary']:,}{left_out}"
        if data["label_entropy"] is None:
            return f"{images}{left_out}"
        labels = f"{len(data['labels'])} labels, entropy of their frequencies {data['label_entropy']:.3f} nats"
        return f"{images}, {labels}{left_out}"
    if "train_tokens" in data:
        return (
            f"{data['train_tokens']:,} training tokens, vocabulary {data['vocabulary']:,}, "
            f"unigram entropy {data['unigram_entropy']:.3f} nats/token"
        )
    return ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in data.items())


def _rank_lines(facts: Mapping[str, Any]) -> list[str]:
    along = " x ".join(f"{axis} {size}" for axis, size in facts["mesh"].items() if size > 1)
    printed = [f"\neach of the ranks of {along} sends {write_size(facts['footprint']['traffic'])} per step, and stores"]
    for stage in facts["stages"]:
        first, last = stage["ranks"][0], stage["ranks"][-1]
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        kept = ", ".join(f"{name} {write_size(stage[name])}" for name in ("parameters", "gradients", "optimizer"))
        printed.append(f"  {ranks}: {kept}")
    return printed
