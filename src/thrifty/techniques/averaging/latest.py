"""LAWA (Kaddour 2022): evaluate and export the mean of the last few copies of the weights.

Paper       Kaddour 2022, Stop Wasting My Time! (arXiv 2209.14981). Sanyal et al. 2023 (arXiv 2306.03241) uses a queue
            of copies during training.
Promise     At a constant learning rate, the mean at any step has about the loss that a decayed learning rate would
            reach. Training itself is unchanged.
Use         optimizer = thrifty.apply(optimizer, "latest", copies=6, total_steps=1000)
            with optimizer.use_eval_weights():
                held_out_loss = model(**next(iter(loader))).loss
Start with  `latest:copies=6,every=0.01`. Raise `every` if the copies are too similar.
Cost        Memory for `copies` float32 copies of the parameters, and one pass over the parameters per copy.
Avoid       Learning rates that decay to zero, because the gain vanishes. Evaluation early in a run, because the mean
            lags behind the weights.
Does not    Average buffers, or keep the copies when growth resets the optimizer.
"""

from collections.abc import Sequence

from torch import Tensor

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.weight_average import high_precision_copy


def uniform_mean(copies: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of several copies of the weights. Each copy lists its tensors in the same order."""
    # no foreach operations, because these refuse plain tensors mixed with tensors sharded over ranks
    means = []
    for first, *others in zip(*copies, strict=True):
        total = first.clone()
        for other in others:
            total.add_(other)
        means.append(total.div_(len(copies)))
    return means


def copies_taken(updates: int, start: int, every: int) -> int:
    """Return the number of copies made in `updates` updates. Copies are made at updates start, start + every, …"""
    return (updates - start) // every + 1 if updates >= start else 0


class LatestWeightsTransform(GradientTransform):
    """A transform that stores copies of the parameters in a ring buffer of `copies` slots. Updates are unchanged.

    The filled slots depend only on the step and the age, which is the number of steps since the state was reset. Copies
    made before a reset do not count.
    """

    name = "latest_weight_average"
    reach = TransformScope.ROWS

    def __init__(self, copies: int, start: int, every: int, evaluate: bool = True):
        self.copies, self.start, self.every, self.evaluate = copies, start, every, evaluate

    def scalars(self, step: int, age: int) -> dict[str, float]:
        before, now, after = (copies_taken(updates, self.start, self.every) for updates in (step - age, step, step + 1))
        return {"taken": now - before, "due": after - now}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {
            f"copy_{index}": [high_precision_copy(parameter) for parameter in parameters]
            for index in range(self.copies)
        }

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        if numbers["due"]:
            slot = slots[f"copy_{int(numbers['taken']) % self.copies}"]
            for copy, parameter in zip(slot, parameters, strict=True):
                copy.copy_(parameter)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        count = min(int(numbers["taken"]), self.copies)
        if not count or not self.evaluate:
            return None
        return uniform_mean([slots[f"copy_{index}"] for index in range(count)])


class LatestWeightAverage(Technique):
    """The trainer evaluates and exports the mean of the copies. The trained weights are also evaluated
    ("trained_loss"), and `thrifty export --raw-weights` exports them. Before `copies` copies exist, the mean covers the
    existing copies."""

    stage, numerics = Stage.AVERAGE, Numerics.DIFFERENT
    claims = frozenset({Claim.AVERAGED_WEIGHTS})

    copies: Positive = 6
    """Number of latest copies in the mean."""
    every: StepOrFraction = 0.01
    """Number of steps between copies, at least one."""
    start: StepOrFraction = 0.1
    """Step of the first copy."""
    evaluate: bool = True
    """Evaluate and export the mean. If false, only checkpoints store the copies."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(
            LatestWeightsTransform(self.copies, int(self.start), max(int(self.every), 1), self.evaluate), transform
        )
