"""Small perceptrons on images of handwritten digits for studies: network, training run, noisy labels, accuracy."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.technique import Technique
from thrifty.data.epoch_sampler import EpochSource, IndexedExamples
from thrifty.data.images.digits import DigitImages, FixedImages
from thrifty.objectives.classification import Classification
from thrifty.techniques.optimizers.sgd import Sgd
from thrifty.techniques.schedules.cosine import CosineDecay

PIXELS, CLASSES = 64, 10


@cache
def pixel_statistics() -> tuple[float, float]:
    """Return the mean and standard deviation of the pixels of all training images."""
    images = DigitImages("train").images
    return float(images.mean()), float(images.std())


class PixelStandardizer(nn.Module):
    """Module that standardizes pixels with the mean and standard deviation of the training images."""

    def forward(self, images: Tensor) -> Tensor:
        mean, deviation = pixel_statistics()
        return (images - mean) / deviation


def linear_layers(sizes: Sequence[int], seed: int, xavier: bool = False) -> list[nn.Module]:
    """Return linear layers of the given sizes, with ReLU between layers, and He or Xavier initialization."""
    generator, modules = torch.Generator().manual_seed(seed), []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        if xavier:
            nn.init.xavier_normal_(layer.weight, generator=generator)
        else:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.ReLU()]
    return modules[:-1]


def perceptron(width: int, seed: int, xavier: bool = False) -> nn.Module:
    """Return a perceptron with three hidden layers and He or Xavier initialization. It maps a batch of b images (b, 8,
    8) to logits (b, 10).
    """
    layers = linear_layers((PIXELS, width, width, width, CLASSES), seed, xavier)
    return nn.Sequential(PixelStandardizer(), nn.Flatten(), *layers)


def decayed_sgd() -> tuple[Technique, ...]:
    """Return the training techniques: SGD with momentum and a cosine schedule."""
    return (Sgd(lr=0.05, momentum=0.9, weight_decay=5e-4), CosineDecay(warmup=0))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the test images in percent."""
    test = DigitImages("test")
    return 100 * float((model.eval()(test.images).argmax(1) == test.labels).float().mean())


def with_wrong_labels(share: float, seed: int) -> tuple[FixedImages, Tensor]:
    """Return the n training images, of which a fraction `share` has wrong labels, and a mask (n,) that is True for
    wrong labels.
    """
    digits, generator = DigitImages("train"), torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(digits), dtype=torch.bool)
    wrong[torch.randperm(len(digits), generator=generator)[: round(share * len(digits))]] = True
    moved = torch.randint(1, CLASSES, (len(digits),), generator=generator)
    return FixedImages(digits.images, torch.where(wrong, (digits.labels + moved) % CLASSES, digits.labels)), wrong


def run_on(build: Callable[[], nn.Module], contents: IndexedExamples, *, steps: int, batch: int, seed: int) -> Run:
    """Return a training run of a classifier. Data order and techniques do not depend on `build`."""
    plain = BaseRun(build, EpochSource(contents, min(batch, len(contents)), seed), Classification())
    return compose(plain, decayed_sgd(), steps)
