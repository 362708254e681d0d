"""What can be said of a run to trainers that know none of our techniques, and what cannot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from thrifty.core.errors import RefusedError
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Numerics, Technique

SAID = {
    "optimizers.adamw", "gradients.clip", "schedules.linear", "schedules.cosine", "precision.mixed", "compile",
    "large_batch.gradient_accumulation", "memory.recompute", "memory.offload_optimizer", "parallelism.shard",
    "parallelism.replicate", "parallelism.tensor", "parallelism.pipeline",
}  # fmt: skip
"""Techniques that have a word elsewhere. A choice: each needs a field here and a line in every export."""


@dataclass(frozen=True)
class PortableRecipe:
    """A run in the words of others. Steps are counted, rates are those at the peak."""

    name: str
    seed: int
    device: str
    batch: int
    """Examples of a step over all ranks."""
    parts: int
    length: int
    steps: int
    dtype: str
    """Of matrix products: "float32", "bfloat16" or "float16"."""
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float | None
    schedule: str
    """"linear", "cosine" or "constant"."""
    warmup: int
    until: int
    floor: float
    compiled: bool
    recompute: str
    """"none", "every" or "selective"."""
    offload_optimizer: bool
    mesh: dict[str, int] = field(default_factory=dict)
    zero: int = 0
    """What is divided along `shard`, by the stages of ZeRO; 0 for nothing."""
    unsaid: tuple[str, ...] = ()
    """Techniques that change no more than memory, time or rounding, and have no word elsewhere."""
    lost: tuple[str, ...] = ()
    """Techniques without which it is another algorithm, and that have no word elsewhere."""

    @classmethod
    def of(cls, recipe: Recipe, techniques: Sequence[Technique], steps: int, device: str) -> Self:
        """`techniques` as composed: their moments are steps."""
        table: dict[str, Any] = {technique.name: technique for technique in techniques}
        adamw, accumulation = table.get("optimizers.adamw"), table.get("large_batch.gradient_accumulation")
        shaped = table.get("schedules.linear") or table.get("schedules.cosine")
        mixed, again, clip = (table.get(n) for n in ("precision.mixed", "memory.recompute", "gradients.clip"))
        others = [technique for technique in techniques if technique.name not in SAID]
        return cls(
            name=recipe.name,
            seed=recipe.seed,
            device=device,
            batch=recipe.data.batch,
            parts=accumulation.micro_batches if accumulation else 1,
            length=recipe.data.length,
            steps=steps,
            dtype=mixed.format if mixed else "float32",
            lr=adamw.lr if adamw else 0.0,
            betas=adamw.betas if adamw else (0.9, 0.999),
            eps=adamw.eps if adamw else 1e-8,
            weight_decay=adamw.weight_decay if adamw else 0.0,
            clip=clip.max_norm if clip else None,
            schedule=shaped.name.partition(".")[2] if shaped else "constant",
            warmup=int(shaped.warmup) if shaped else 0,
            until=int(shaped.until) if shaped else steps,
            floor=shaped.floor if shaped else 0.0,
            compiled="compile" in table,
            recompute="none" if again is None else "selective" if again.schedule == "selective" else "every",
            offload_optimizer="memory.offload_optimizer" in table,
            mesh={name: max(size, 1) for name, size in vars(recipe.mesh).items()},
            zero=table["parallelism.shard"].zero if recipe.mesh.shard > 1 and "parallelism.shard" in table else 0,
            unsaid=tuple(t.name for t in others if t.numerics is not Numerics.DIFFERENT),
            lost=tuple(t.name for t in others if t.numerics is Numerics.DIFFERENT),
        )

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        return self.mesh.get("replicate", 1) * self.mesh.get("shard", 1)

    def refuse_other_axes(self, trainer: str) -> None:
        """Raises RefusedError where ranks compute layers together, or blocks after one another."""
        for axis in ("tensor", "pipeline"):
            if self.mesh.get(axis, 1) > 1:
                raise RefusedError(
                    f"{trainer}: its configuration has no word for ranks along {axis}",
                    fix="--export torchtitan, which has",
                )

    def notes(self) -> list[str]:
        """What is not in the words of others, a line each."""
        said = []
        if self.lost:
            said.append(f"without {', '.join(self.lost)}, for which there is no word here: it learns otherwise")
        if self.unsaid:
            said.append(f"without {', '.join(self.unsaid)}: the same values, other memory and time")
        return said
