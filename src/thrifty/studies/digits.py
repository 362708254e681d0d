"""A perceptron on images of handwritten digits, for studies that train some: the network, how it is trained, and how
many digits it tells right."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from thrifty.core.technique import Technique
from thrifty.data.digits import DigitImages
from thrifty.techniques.optimizers.sgd import Sgd
from thrifty.techniques.schedules.cosine import Cosine

PIXELS, CLASSES = 64, 10


@cache
def pixel_statistics() -> tuple[float, float]:
    """Mean and standard deviation of the pixels of the training images."""
    images = DigitImages("train").images
    return float(images.mean()), float(images.std())


class Standardize(nn.Module):
    """Pixels as the training images have them, with their mean and standard deviation taken out."""

    def forward(self, images: Tensor) -> Tensor:
        mean, deviation = pixel_statistics()
        return (images - mean) / deviation


def perceptron(width: int, seed: int, xavier: bool = False) -> nn.Module:
    """Images (b, 8, 8) through three hidden layers to logits (b, 10), from He's first weights or Xavier's."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [PIXELS, width, width, width, CLASSES]
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    for layer in layers:
        if xavier:
            nn.init.xavier_normal_(layer.weight, generator=generator)
        else:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(layer.bias)
    between = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
    return nn.Sequential(Standardize(), nn.Flatten(), *between, layers[-1])


def decayed_sgd() -> tuple[Technique, ...]:
    """What these networks are trained with: momentum, and a rate that falls by a cosine to the end of the run."""
    return (Sgd(lr=0.05, momentum=0.9, weight_decay=5e-4), Cosine(warmup=0))


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Percent of the test images that are told right."""
    test = DigitImages("test")
    return 100 * float((model.eval()(test.images).argmax(1) == test.labels).float().mean())
