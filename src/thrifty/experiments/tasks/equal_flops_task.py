"""Small language models that all cost the same and are trained in different ways: what is measured of them, and how it
is shown."""

from collections.abc import Sequence

from thrifty.core.technique import Technique
from thrifty.experiments.study import MeasuredQuantity, StudyPlot
from thrifty.experiments.tasks.language_task import train_llama
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW

EXAMPLES = 1024
"""Held-out examples that a model is judged by."""

QUANTITIES = {
    "loss": MeasuredQuantity("held-out loss, nats per byte"),
    "gain": MeasuredQuantity("by how many nats the loss is below that without it, of the same seed"),
    "steps": MeasuredQuantity("steps that the work paid for"),
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
    """The `QUANTITIES` of a model of bytes after so many steps of clipped AdamW with these techniques, a schedule among
    them."""
    chosen = [AdamW(lr=lr), GradientClipping(), *techniques]
    trained = train_llama(chosen, steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch)
    return {"loss": trained.held_out_loss(EXAMPLES), "steps": steps, "seconds": trained.seconds}


def losses_by(way: str) -> StudyPlot:
    """The losses at each budget, `full_steps`, a line for each value of `way`."""
    return StudyPlot("loss", "Held-out loss at equal work, nats per byte", x="full_steps", y="loss", by=way, log_x=True)
