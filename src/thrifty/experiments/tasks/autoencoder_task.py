"""Small masked autoencoders, and classifiers initialized from their encoders, for studies."""

import statistics
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from timeit import timeit

import numpy as np
import torch
from torch import nn

from thrifty.composition.compose import CPU, BaseRun, compose
from thrifty.composition.explain import count
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.objective import Objective
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.core.technique import Technique
from thrifty.core.tensor_tracing import StepTrace
from thrifty.data.images.image_data import ImageData, TrainingImages, open_images
from thrifty.data.train_split import DataSplit
from thrifty.experiments.tasks.whole_run import initialized, run_to_end
from thrifty.kernels.keyed_permutation import permute
from thrifty.models.masked_autoencoder import MaskedAutoencoder, encoder_alone
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.models.vision_transformer import Pool
from thrifty.objectives.classification import Classification
from thrifty.objectives.masked_reconstruction import MaskedReconstruction
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.cosine import CosineDecay
from thrifty.training.evaluation import evaluate

HEAD_WIDTH = 32
LABELLED_KEY = 0x4C41424C


@dataclass(frozen=True)
class AutoencoderSizes:
    """Sizes of encoder and decoder. Encoder heads have width 32."""

    patch: int
    depth: int
    width: int
    decoder_depth: int
    decoder_width: int

    def autoencoder(self, seed: int, side: int, channels: int) -> MaskedAutoencoder:
        heads, decoder_heads = (max(width // HEAD_WIDTH, 1) for width in (self.width, self.decoder_width))
        shape = ModelConfig(
            "mae", self.depth, self.width, heads, heads, 4 * self.width, 0, 0, tied=False, norm_eps=1e-6,
            image=side, patch=self.patch, channels=channels, decoder_depth=self.decoder_depth,
            decoder_width=self.decoder_width, decoder_heads=decoder_heads, decoder_hidden=4 * self.decoder_width,
        )  # fmt: skip
        model = initialized(shape, seed)
        assert isinstance(model, MaskedAutoencoder)
        return model


def adamw(lr: float) -> list[Technique]:
    """Return the techniques of MAE pre-training: AdamW, a cosine schedule to zero, gradient clipping."""
    return [AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.05), CosineDecay(warmup=0.05), GradientClipping()]


def masked(
    sizes: AutoencoderSizes, data: str, batch: int, rate: float, seed: int, augment: AugmentationSettings | None = None
) -> BaseRun:
    """Return a run without added techniques that reconstructs the masked patches of an image set."""
    settings = DataSettings(source=data, batch=batch, augment=augment)
    images = open_images(settings, seed, None, lambda text: None, labelled=False)
    ends = images.ends
    objective = MaskedReconstruction(rate=rate, patch=sizes.patch)
    return BaseRun(lambda: sizes.autoencoder(seed, ends.side, ends.channels), images.train, objective)


@dataclass(frozen=True)
class LabelledImages:
    """A labeled training subset of an image set, and all test images of the set."""

    images: ImageData
    train: TrainingImages

    @classmethod
    def of(
        cls, data: str, labels: int, batch: int, seed: int, augment: AugmentationSettings | None = None
    ) -> "LabelledImages":
        """Return a random subset of `labels` labeled images. Each seed selects a different subset."""
        settings = DataSettings(source=data, batch=batch, augment=augment)
        images = open_images(settings, seed, None, lambda text: None)
        whole = images.parts[DataSplit.TRAIN]
        chosen = permute(np.arange(labels), len(whole), LABELLED_KEY + seed)
        few = replace(whole, pixels=np.asarray(whole.pixels[chosen]), labels=whole.labels[chosen])
        return cls(images, TrainingImages(few, min(batch, labels), seed, augment))

    def accuracy(self, model: nn.Module, objective: Objective, tested: int) -> float:
        """Return the accuracy in percent on the first `tested` test images."""
        return 100 * evaluate(model, objective, self.images.held_out.batches(tested, 250), CPU)["accuracy"]


def tuned(
    start: MaskedAutoencoder,
    labelled: LabelledImages,
    techniques: Sequence[Technique],
    pool: Pool,
    steps: int,
    seed: int,
) -> tuple[nn.Module, Classification]:
    """Return a classifier, fine-tuned for `steps` steps from an autoencoder's encoder, and its objective."""
    labels, objective = len(labelled.images.ends.labels), Classification(label_smoothing=0.1)

    def build() -> nn.Module:
        vit = encoder_alone(deepcopy(start), labels, pool)
        initialize(vit, seed, within="head.")
        return vit

    return run_to_end(compose(BaseRun(build, labelled.train, objective), techniques, steps), seed)[0], objective


class EncoderPace:
    """Timer of an autoencoder training step, and of the encoder's forward and backward pass alone. Inputs are fixed
    random RGB images.

    With techniques, the encoder processes only visible patches.
    """

    def __init__(self, sizes: AutoencoderSizes, side: int, images: int, rate: float, techniques: Sequence[Technique]):
        inputs = torch.randn(images, 3, side, side, generator=torch.Generator().manual_seed(0))
        plain = Batch({"inputs": inputs, "key": torch.arange(images)}, torch.full((images,), 1 / images))
        objective = MaskedReconstruction(rate=rate, patch=sizes.patch)
        self.batch = objective.examples(plain)
        build = BaseRun(lambda: sizes.autoencoder(0, side, 3), RepeatedBatch(self.batch), objective)
        self.run = compose(build, [AdamW(), *techniques], 1)
        self.state = self.run.start()
        self.visible = self.batch["visible"] if techniques else None

    def encoder(self) -> None:
        assert isinstance(self.state.model, MaskedAutoencoder)
        self.state.model.encode(self.batch["inputs"], self.visible).sum().backward()

    def step(self) -> None:
        assert self.state.model is not None and self.state.optimizer is not None
        self.run.backward(self.state.model, self.run.objective, self.batch)
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()

    def flops(self) -> dict[str, float]:
        """Return the FLOPs of a training step, and of the encoder's forward and backward pass."""
        with StepTrace() as trace:
            self.encoder()
        return {"step_flops": count(self.run, self.run.techniques)[1].flops, "encoder_flops": trace.flops}

    def gains(self, other: "EncoderPace", rounds: int) -> dict[str, float]:
        """Return the speedup relative to `other`, for the step and for the encoder.

        Each speedup is the median time ratio over rounds. Each round times `self` and `other` once. The first round is
        discarded.
        """
        medians = {}
        for part in ("step", "encoder"):
            mine, theirs = getattr(self, part), getattr(other, part)
            ratios = [timeit(theirs, number=1) / timeit(mine, number=1) for _ in range(1 + rounds)]
            medians[f"{part}_gain"] = statistics.median(ratios[1:])
        return medians


class RepeatedBatch(BatchSource):
    """Source that returns the same batch at every step."""

    def __init__(self, only: Batch):
        self.only, self.batch = only, len(only)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.only.rows(start, stop)
