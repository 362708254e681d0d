"""Schedule-Free AdamW (Defazio et al. 2024): replace learning-rate decay by an average of all steps.

Paper       Defazio et al. 2024, The Road Less Scheduled (arXiv 2405.15682).
Promise     The run can stop at any step, evaluated as if the rate had been decayed for it. Equal to AdamWScheduleFree
            of schedulefree 1.4.
Use         optimizer = thrifty.optim.ScheduleFreeAdamW(model, lr=2.5e-3, total_steps=10_000)
Start with  `schedule_free:lr=2.5e-3,warmup=0.05`.
Cost        AdamW's state: a second moment, and the distance to a second sequence of weights.
Avoid       Large language models at large batches: the authors tested small ones, and adapt it to larger ones in arXiv
            2605.19095.
Does not    Combine with a schedule or another weight average. It has its own warm-up.
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
    """What is added to y, given a direction of ascent d at y and `ahead` = z - y, which moves along.

    z -= rate · d;  x += share · (z - x);  y = beta · x + (1 - beta) · z

    Without x, `ahead` becomes (1 - share) · (ahead - beta · rate · d), and y moves by what `ahead` loses less rate · d.
    """
    kept = (1 - share) * beta * rate
    moved = torch._foreach_mul(ahead, share)
    add_multiple(moved, direction, kept - rate)
    torch._foreach_mul_(ahead, 1 - share)
    add_multiple(ahead, direction, -kept)
    return list(moved)


class ScheduleFreeTransform(GradientTransform):
    """The steps of z, the average x and the point y between them, from directions of ascent; the last of a chain.

    A step weighs count^power · (rate / largest rate)^rate_power in the average: with both at their defaults each counts
    alike once the warm-up is over, and little before.
    """

    name = "schedule_free"
    reach = TransformScope.ROWS
    weights = frozenset({"ahead"})

    def __init__(self, rate: float, beta: float = 0.9, warmup: int = 0, power: float = 0.0, rate_power: float = 2.0):
        if beta <= 0:
            raise UsageError(
                "Schedule-Free: the first of betas is 0, and then its average cannot be told from the weights",
                fix="give a value above 0; 0.9 is the paper's",
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
        """The weights of all steps since the state was fresh. Kept only to save time: it is added up from the first
        again in a run that is resumed."""
        sums = self._sums.setdefault(step - age, [0.0])
        for since in range(len(sums) - 1, age + 1):
            sums.append(sums[-1] + self._weight(step - age + since, since))
        return sums[age + 1]

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {"ahead": [torch.zeros_like(parameter) for parameter in parameters]}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return schedule_free_update(updates, slots["ahead"], numbers["rate"], numbers["share"], self.beta)

    def eval_weights(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        pairs = zip(parameters, slots["ahead"], strict=True)  # of which some may be divided over ranks
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
    """Adam's direction without a first moment, plus weight_decay · parameter, moved and averaged by
    `ScheduleFreeTransform`.
    What else multiplies updates, as `factors`, must come before the average."""
    return chain(
        ScaleByAdam(0.0, betas[1], eps),
        AddDecayedWeights(weight_decay) if weight_decay else GradientTransform(),
        factors or GradientTransform(),
        ScheduleFreeTransform(lr, betas[0], warmup, power, rate_power),
    )


class ScheduleFreeAdamW(Technique):
    """Gradients are computed at y, the weights during training. Evaluation and export use the average x. As in the
    authors' code, decay is computed at y; it spares vectors, biases and positions. The method is the core of the
    winning entry of AlgoPerf 2024's self-tuning track."""

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER, Claim.SCHEDULE, Claim.AVERAGED_WEIGHTS})

    lr: Rate = 2.5e-3
    betas: Betas = (0.9, 0.999)
    """Where y stands between z and x, and how slowly the second moment forgets."""
    eps: Epsilon = 1e-8
    weight_decay: Rate = 0.1
    warmup: StepOrFraction = 0.05
    power: Rate = 0.0
    """The paper's r: a step weighs in the average as its number to this power."""
    rate_power: Rate = 2.0
    """And as its rate to this power, relative to the largest so far."""

    def update(self, transform: GradientTransform) -> GradientTransform:
        return schedule_free(
            self.lr, self.betas, self.eps, self.weight_decay, int(self.warmup), self.power, self.rate_power, transform
        )
