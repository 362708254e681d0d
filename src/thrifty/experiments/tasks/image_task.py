"""Small Vision Transformers on labeled images for studies."""

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.composition.compose import CPU, BaseRun, Run, compose
from thrifty.core.recipe import DataSettings
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.data.images.image_data import ImageData, open_images
from thrifty.experiments.tasks.whole_run import initialized, run_to_end
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.classification import Classification
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.cosine import CosineDecay
from thrifty.training.evaluation import evaluate

HEAD_WIDTH = 32


@dataclass(frozen=True)
class TrainedImageModel:
    run: Run
    state: TrainState
    images: ImageData

    @property
    def seconds(self) -> float:
        """Duration in seconds of all training steps."""
        return self.state.counters["seconds"]

    def judged(self, tested: int) -> dict[str, float]:
        """Return "accuracy" (a fraction) and "loss" (nats) on the first `tested` held-out images at full size."""
        assert self.state.model is not None
        return evaluate(self.state.model, Classification(), self.images.held_out.batches(tested, 250), CPU)


def train_on_images(
    techniques: Sequence[Technique],
    *,
    steps: int,
    seed: int,
    data: str,
    depth: int,
    width: int,
    patch: int,
    batch: int,
    lr: float,
) -> TrainedImageModel:
    """Train a ViT with heads of width 32 on a known image set or a folder of images.

    The recipe follows DeiT: AdamW, a cosine schedule after a short warm-up, and label smoothing. `techniques` are
    added.
    """
    images = open_images(DataSettings(source=data, batch=batch), seed, None, lambda text: None)
    ends, heads = images.ends, width // HEAD_WIDTH or 1
    shape = ModelConfig(
        "vit", depth, width, heads, heads, 4 * width, len(ends.labels), 0, tied=False,
        image=ends.side, patch=patch, channels=ends.channels,
    )  # fmt: skip
    plain = BaseRun(lambda: initialized(shape, seed), images.train, Classification(label_smoothing=0.1))
    chosen = [AdamW(lr=lr, weight_decay=0.05), CosineDecay(warmup=0.05), GradientClipping(), *techniques]
    run = compose(plain, chosen, steps)
    return TrainedImageModel(run, run_to_end(run, seed)[1], images)
