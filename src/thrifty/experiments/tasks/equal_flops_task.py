"""Small language models trained with different techniques at equal FLOPs: measured quantities and plot."""

from collections.abc import Sequence

from thrifty.core.technique import Technique
from thrifty.experiments.study import MeasuredQuantity, StudyPlot
from thrifty.experiments.tasks.language_task import train_llama
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW

EXAMPLES = 1024
"""Number of held-out examples per evaluation."""

QUANTITIES = {
    "loss": MeasuredQuantity("held-out loss, nats per byte"),
    "gain": MeasuredQuantity("nats by which the loss is below that of the baseline with the same seed"),
    "steps": MeasuredQuantity("steps at equal FLOP"),
    "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
}


def after(
    steps: int,
    techniques: Sequence[Technique],
    *,
    seed: int,
    depth: int,
    width: int,
    length: int,
    batch: int,
    lr: float,
) -> dict[str, float]:
    """Return the `QUANTITIES` of a byte model after `steps` steps with AdamW, gradient clipping and `techniques`.

    The techniques must include a schedule.
    """
    chosen = [AdamW(lr=lr), GradientClipping(), *techniques]
    trained = train_llama(chosen, steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch)
    return {"loss": trained.held_out_loss(EXAMPLES), "steps": steps, "seconds": trained.seconds}


def losses_by(by: str) -> StudyPlot:
    """Return the plot of the loss by budget (`full_steps`), with one line per value of the setting `by`."""
    return StudyPlot("loss", "Held-out loss at equal FLOP, nats per byte", x="full_steps", y="loss", by=by, log_x=True)
