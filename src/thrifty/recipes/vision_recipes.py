"""Recipes of Vision Transformers on labelled images."""

import torch

from thrifty.core import recipe
from thrifty.core.technique import Technique
from thrifty.machine.cpu_features import can_compile, has_fast_bfloat16
from thrifty.techniques.compile import CompiledBlocks
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.precision.mixed import MixedPrecision
from thrifty.techniques.schedules.cosine import CosineDecay


def image_techniques(lr: float) -> tuple[Technique, ...]:
    """Return AdamW with DeiT's weight decay, cosine decay and gradient clipping.

    Mixed precision is added if the processor has bfloat16 instructions. Compiled blocks are added on GPUs, if there is
    a compiler.
    """
    chosen: list[Technique] = [AdamW(lr=lr, weight_decay=0.05), CosineDecay(), GradientClipping()]
    if has_fast_bfloat16():
        chosen.append(MixedPrecision())
    if can_compile() and torch.cuda.is_available():
        chosen.append(CompiledBlocks())
    return tuple(chosen)


def vit_digits() -> recipe.Recipe:
    """A small ViT classifier of the 1,797 handwritten digits that Thrifty includes (no download).

    Command   thrifty train vit-digits
    Expect    After 600 steps, 97 % accuracy on the 497 test images (97.4 % with seed 0), in about one minute on one
              core.
    """
    return recipe.Recipe(
        name="vit-digits",
        about="A small Vision Transformer on the handwritten digits of Thrifty.",
        model=recipe.ModelSettings(preset="vit-nano", patch=2, width=64),
        data=recipe.DataSettings(source="digits", batch=64),
        objective=recipe.ObjectiveSettings("classification"),
        budget=recipe.Budget(steps=600),
        evaluation=recipe.EvaluationSettings(every=100, examples=497),
        checkpoints=recipe.CheckpointSettings(every=300),
        techniques=(AdamW(lr=2e-3, weight_decay=0.05), CosineDecay(), GradientClipping()),
    )


def vit_cifar10() -> recipe.Recipe:
    """A ViT classifier of 0.8M parameters on CIFAR-10.

    Command   thrifty data get cifar10 && thrifty train vit-cifar10
    Expect    On one core with bfloat16 instructions, a step takes 0.5 s. After 365 steps, less than one epoch, the
              accuracy on 2,000 test images is 38 % (seed 0). The whole recipe has ten epochs and was not run.
    """
    augment = recipe.AugmentationSettings(crop=4, flip=True, operations=2, magnitude=0.3)
    return recipe.Recipe(
        name="vit-cifar10",
        about="A small Vision Transformer on CIFAR-10, with crops, flips and two augmentations per image.",
        model=recipe.ModelSettings(preset="vit-nano"),
        data=recipe.DataSettings(source="cifar10", batch=128, augment=augment),
        objective=recipe.ObjectiveSettings("classification", label_smoothing=0.1),
        budget=recipe.Budget(steps=4000),
        evaluation=recipe.EvaluationSettings(every=500, examples=2000),
        checkpoints=recipe.CheckpointSettings(every=1000),
        techniques=image_techniques(lr=1e-3),
    )
