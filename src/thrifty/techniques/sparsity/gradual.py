"""Gradual pruning (Zhu and Gupta 2017): train dense first and remove the smallest weights step by step.

Paper       Zhu and Gupta 2017, To prune, or not to prune (arXiv 1710.01878), equation 1, cubic schedule.
Promise     Density falls from `initial_density` at `start` to `density` at `until`, and never rises. The remaining
            steps train the sparse weights.
Use         model, optimizer = thrifty.apply((model, optimizer), "gradual", density=0.2, total_steps=10_000)
Start with  `gradual:density=0.2,until=0.75`. Use `distribution=erk` or `distribution=global` for low densities.
Cost        One boolean mask per weight matrix, and a sort of the weights once in `every` steps. Early steps are dense
            and compute more than steps that are sparse from the start.
Avoid       Models that do not fit in memory when dense. Runs too short to recover after `until`.
Does not    Restore pruned weights.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, Positive
from thrifty.core.state import TrainState
from thrifty.optim.mask_selection import global_count, largest, largest_of_all, layer_counts
from thrifty.optim.weight_masks import LayerReader, check_masks
from thrifty.techniques.sparsity._mask_techniques import MatrixMaskTechnique


def cubic_density(step: int, start: int, until: int, initial: float, final: float) -> float:
    """Return the density at a step, final + (initial - final) · (1 - progress)³.

    progress rises from 0 at `start` to 1 at `until`.
    """
    progress = min(max((step - start) / max(until - start, 1), 0.0), 1.0) if step < until else 1.0
    return final + (initial - final) * (1 - progress) ** 3


def magnitudes(weight: Tensor, mask: Tensor) -> Tensor:
    """Return the magnitude of each weight, and -1 outside the mask, so that pruned weights are never restored."""
    return weight.abs().masked_fill(~mask, -1.0)


class GradualPruning(MatrixMaskTechnique):
    """distribution = "global" uses one threshold for all layers and may remove all weights of a layer. The metric
    "empty_weights" counts such layers. "uniform" and "erk" select within each layer. To prune an existing dense run,
    fork it with `start` at the step of the fork or later."""

    replaces_update: ClassVar[bool] = False

    initial_density: Fraction = 1.0
    """Density at `start`."""
    start: StepOrFraction = 0.0
    until: StepOrFraction = 0.75
    """Step at which the final density is reached."""
    every: Positive = 100
    """Number of steps between prunings. The last pruning is at `until`."""
    distribution: Literal["uniform", "erk", "global"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_density < self.density:
            raise UsageError(
                f"{self.name}: initial_density {self.initial_density} is below density {self.density}",
                fix=f"--set techniques.{self.name}.initial_density=1.0",
            )
        # fractions of the run and steps cannot be compared yet
        if type(self.start) is type(self.until) and self.until < self.start:
            raise UsageError(
                f"{self.name}: until is {self.until}, before the start at {self.start}",
                fix=f"--set techniques.{self.name}.until={self.start}",
            )
        if isinstance(self.until, float) and self.until >= 1:
            raise UsageError(
                f"{self.name}: until is {self.until}, after which no update could reach the final density",
                fix=f"--set techniques.{self.name}.until=0.75",
            )

    def moves_at(self, step: int) -> bool:
        start, until = int(self.start), int(self.until)
        return step == until or (start <= step < until and (step - start) % self.every == 0)

    def density_at(self, step: int) -> float:
        """Return the density after a step that prunes."""
        return cubic_density(step, int(self.start), int(self.until), self.initial_density, self.density)

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        matrices = ((name, layer(name)) for name in names)
        scores = {name: magnitudes(matrix.weight, matrix.mask) for name, matrix in matrices}
        shapes = {name: tuple(values.shape) for name, values in scores.items()}
        if self.distribution == "global":
            yield from largest_of_all(scores, global_count(shapes, self.density_at(step))).items()
            return
        for name, count in layer_counts(shapes, self.density_at(step), self.distribution).items():
            yield name, largest(scores[name], count)

    def holds(self, state: TrainState) -> None:
        assert state.optimizer is not None
        pruned = [step for step in range(state.optimizer.updates) if self.moves_at(step)]
        density = self.density_at(pruned[-1]) if pruned else 1.0
        by_layer = self.distribution != "global"
        check_masks(self.name, state, self.allowed(state, density, self.distribution) if by_layer else {})
        if not by_layer:
            self.check_total(state, density)
