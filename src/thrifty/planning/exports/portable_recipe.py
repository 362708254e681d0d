"""The settings of a run that other trainers support, and the techniques that other trainers lack."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from thrifty.core.errors import RefusedError
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Numerics, Technique

SUPPORTED = {
    "optimizers.adamw", "gradients.clip", "schedules.linear", "schedules.cosine", "precision.mixed", "compile",
    "large_batch.gradient_accumulation", "memory.recompute", "memory.offload_optimizer", "parallelism.shard",
    "parallelism.replicate", "parallelism.tensor", "parallelism.pipeline",
}  # fmt: skip
"""Techniques with an equivalent in other trainers. `PortableRecipe` and all exports support these techniques."""


@dataclass(frozen=True)
class PortableRecipe:
    """A run with the settings that other trainers support. Durations are in steps, and `lr` is the peak learning
    rate."""

    name: str
    seed: int
    device: str
    batch: int
    """Number of examples per step, over all ranks."""
    parts: int
    length: int
    steps: int
    dtype: str
    """Number format of matrix products: "float32", "bfloat16" or "float16"."""
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
    """ZeRO stage along `shard`; 0 for no sharding."""
    unsupported: tuple[str, ...] = ()
    """Techniques that change only memory, time or rounding, and that other trainers lack."""
    lost: tuple[str, ...] = ()
    """Techniques that change the algorithm, and that other trainers lack."""

    @classmethod
    def of(cls, recipe: Recipe, techniques: Sequence[Technique], steps: int, device: str) -> Self:
        """Return the portable form of a recipe. Durations of `techniques` must be in steps."""
        table: dict[str, Any] = {technique.name: technique for technique in techniques}
        adamw, accumulation = table.get("optimizers.adamw"), table.get("large_batch.gradient_accumulation")
        decay = table.get("schedules.linear") or table.get("schedules.cosine")
        mixed, recompute, clip = (table.get(n) for n in ("precision.mixed", "memory.recompute", "gradients.clip"))
        others = [technique for technique in techniques if technique.name not in SUPPORTED]
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
            schedule=decay.name.partition(".")[2] if decay else "constant",
            warmup=int(decay.warmup) if decay else 0,
            until=int(decay.until) if decay else steps,
            floor=decay.floor if decay else 0.0,
            compiled="compile" in table,
            recompute="none" if recompute is None else "selective" if recompute.schedule == "selective" else "every",
            offload_optimizer="memory.offload_optimizer" in table,
            mesh={name: max(size, 1) for name, size in vars(recipe.mesh).items()},
            zero=table["parallelism.shard"].zero if recipe.mesh.shard > 1 and "parallelism.shard" in table else 0,
            unsupported=tuple(t.name for t in others if t.numerics is not Numerics.DIFFERENT),
            lost=tuple(t.name for t in others if t.numerics is Numerics.DIFFERENT),
        )

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def data_ranks(self) -> int:
        return self.mesh.get("replicate", 1) * self.mesh.get("shard", 1)

    def refuse_other_axes(self, trainer: str) -> None:
        """Raise RefusedError if the mesh has tensor or pipeline ranks."""
        for axis in ("tensor", "pipeline"):
            if self.mesh.get(axis, 1) > 1:
                raise RefusedError(
                    f"{trainer}: its configuration has no key for ranks along {axis}",
                    fix="--export torchtitan",
                )

    def refuse_other_optimizers(self, trainer: str) -> None:
        """Raise RefusedError if the recipe has another optimizer than AdamW."""
        if self.lr == 0.0:
            others = [name for name in (*self.lost, *self.unsupported) if name.startswith("optimizers.")]
            raise RefusedError(
                f"{trainer}: the exported optimizer is AdamW, but the recipe has {', '.join(others) or 'none'}",
                fix=" ".join([*(f"--without {name}" for name in others), "--with optimizers.adamw"])
                + "; for a plan: --allow rounding",
            )

    def notes(self) -> list[str]:
        """Return comments that name the techniques without an equivalent."""
        lines = []
        if self.lost:
            lines.append(f"without {', '.join(self.lost)}, which are unsupported here, so results differ")
        if self.unsupported:
            lines.append(f"without {', '.join(self.unsupported)}: same results, but different memory and time")
        return lines
