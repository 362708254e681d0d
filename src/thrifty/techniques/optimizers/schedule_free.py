"""Schedule-Free AdamW (Defazio et al. 2024): replace learning-rate decay by an average of the weights over all steps.

Paper       Defazio et al. 2024, The Road Less Scheduled (arXiv 2405.15682).
Promise     A run can stop at any step, with a loss as if the learning rate had been decayed until that step. Equal to
            AdamWScheduleFree of schedulefree 1.4.
Use         optimizer = thrifty.optim.ScheduleFreeAdamW(model, lr=2.5e-3, total_steps=10_000)
Start with  `schedule_free:lr=2.5e-3,warmup=0.05`.
Cost        As much state as AdamW: a second moment, and the difference between two sequences of weights.
Avoid       Large language models at large batches, because the authors tested small models. Their adaptation to larger
            models is in arXiv 2605.19095.
Does not    Combine with a schedule or a second weight average; the method has its own warm-up and average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import Content, GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Betas, Epsilon, Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.optim.transform_elements import AddDecayedWeights, ScaleByAdam, add_multiple


def schedule_free_update(
    direction: list[Tensor], ahead: list[Tensor], rate: float | Tensor, share: float | Tensor, beta: float
) -> list[Tensor]:
    """Return the update of the training weights y, and update `ahead` = z - y in place.

    The weights z make the steps, along an ascent direction d that is computed at y. x is the average of z.

    z -= rate · d; x += share · (z - x); y = beta · x + (1 - beta) · z

    Because x is not stored, `ahead` becomes (1 - share) · (ahead - beta · rate · d). The update of y is the decrease of
    `ahead` minus rate · d.
    """
    ahead_rate = (1 - share) * beta * rate
    update = torch._foreach_mul(ahead, share)
    add_multiple(update, direction, ahead_rate - rate)
    torch._foreach_mul_(ahead, 1 - share)
    add_multiple(ahead, direction, -ahead_rate)
    return list(update)


class ScheduleFreeTransform(GradientTransform):
    """The last transform of a chain: it steps the weights z, averages them in x, and updates the training weights y
    between z and x.

    In the average, step t has the weight t^power · (learning rate / peak learning rate)^rate_power. With the defaults
    all steps after the warm-up have equal weights, and warm-up steps have smaller weights.
    """

    name = "schedule_free"
    reach = TransformScope.ROWS
    weights = frozenset({"ahead"})

    def __init__(self, rate: float, beta: float = 0.9, warmup: int = 0, power: float = 0.0, rate_power: float = 2.0):
        if beta <= 0:
            raise UsageError(
                f"Schedule-Free: the first of betas is {beta:g}, and must be above 0",
                fix="--set techniques.optimizers.schedule_free.betas=[0.9,0.999]",
            )
        self.largest, self.beta, self.warmup = rate, beta, warmup
        self.power, self.rate_power = power, rate_power
        self._sums: dict[int, list[float]] = {}

    def scalars(self, step: int, age: int) -> dict[str, float]:
        return {"rate": self.largest * self._warmed(step), "share": self._weight(step, age) / self._sum(step, age)}

    def _warmed(self, step: int) -> float:
        return min((step + 1) / self.warmup, 1.0) if self.warmup else 1.0

    def _weight(self, step: int, age: int) -> float:
        return (age + 1) ** self.power * self._warmed(step) ** self.rate_power

    def _sum(self, step: int, age: int) -> float:
        """Return the cached sum of the averaging weights of all steps since the state was initialized."""
        sums = self._sums.setdefault(step - age, [0.0])
        for since in range(len(sums) - 1, age + 1):
            sums.append(sums[-1] + self._weight(step - age + since, since))
        return sums[age + 1]

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"ahead": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return schedule_free_update(updates, slots["ahead"], numbers["rate"], numbers["share"], self.beta)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        pairs = zip(parameters, slots["ahead"], strict=True)  # some tensors may be sharded
        return [parameter.add(ahead, alpha=1 - 1 / self.beta) for parameter, ahead in pairs]

    def slot_kind(self, slot: str) -> Content:
        return "differences"

    def rate(self, numbers: Scalars) -> float:
        return float(numbers["rate"])


def schedule_free(
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    warmup: int = 0,
    power: float = 0.0,
    rate_power: float = 2.0,
    factors: GradientTransform | None = None,
) -> GradientTransform:
    """Return Schedule-Free AdamW as a chain of transforms.

    The direction is Adam's without a first moment, plus weight_decay · parameter. `ScheduleFreeTransform` averages the
    steps. `factors` are transforms that multiply updates. They must come before the average.
    """
    return chain(
        ScaleByAdam(0.0, betas[1], eps),
        AddDecayedWeights(weight_decay),
        factors or GradientTransform(),
        ScheduleFreeTransform(lr, betas[0], warmup, power, rate_power),
    )


class ScheduleFreeAdamW(Technique):
    """Gradients are computed at y, the weights during training. Evaluation and export use the average x. As in the
    authors' code, weight decay is computed at y. Vectors, biases and position embeddings are not decayed. The method is
    the core of the winning entry of AlgoPerf 2024's self-tuning track."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER, Claim.SCHEDULE, Claim.AVERAGED_WEIGHTS})

    lr: Rate = 2.5e-3
    betas: Betas = (0.9, 0.999)
    """Weight of the average x in the training weights y, and decay rate of the second moment."""
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1
    warmup: StepOrFraction = 0.05
    power: Rate = 0.0
    """Exponent of the step number in the averaging weight of a step, the paper's r."""
    rate_power: Rate = 2.0
    """Exponent of the learning rate, relative to its peak, in the averaging weight of a step."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return schedule_free(
            self.lr, self.betas, self.eps, self.weight_decay, int(self.warmup), self.power, self.rate_power, transform
        )
