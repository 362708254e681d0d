"""Training step of a contrastive model with dropped patches, against whole images; and its loss computed in tiles.

    python benchmarks/bench_flip.py [--images 32 --preset clip-vit-b16 --depth 2 --pairs 4096] [--json FOLDER]

A step is forward, backward and update, with the preset's widths, fewer blocks and captions of 32 tokens, so only the
image encoder gains. The loss alone uses this many pairs of vectors with 512 elements, forward and backward, in tiles
and with the whole matrix; its largest tensor is reported too.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from side_by_side import print_timings, ratio, save_timings, side_by_side
from steps import SameRows, whole_step
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.technique import Technique
from thrifty.kernels.contrastive_loss import contrastive_losses, contrastive_losses_reference
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import PRESETS
from thrifty.models.transformer import initialize
from thrifty.objectives.contrastive import Contrastive
from thrifty.techniques.data_selection.drop_patches import DropPatches
from thrifty.techniques.optimizers.adamw import AdamW

RATES = (0.5, 0.75)
WHOLE, MATRIX = "whole images", "whole matrix"
LENGTH, SPACE = 32, 512
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pairs(count: int, shape: ModelConfig) -> SameRows:
    """Return a batch of random images and captions."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, shape.channels, shape.image, shape.image, generator=generator)
    return SameRows({"inputs": inputs, "tokens": torch.randint(shape.vocabulary, (count, LENGTH), generator=generator)})


def composed(shape: ModelConfig, count: int, techniques: list[Technique]) -> Run:
    def build() -> nn.Module:
        model = assemble(shape)
        initialize(model, 0)
        return model

    return compose(BaseRun(build, pairs(count, shape), Contrastive()), [AdamW(), *techniques], 10, DEVICE)


def loss_alone(losses: Callable[[Tensor, Tensor], Tensor], pairs: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    random = (torch.randn(pairs, SPACE, generator=generator) for _ in range(2))
    images, captions = (torch.nn.functional.normalize(each).to(DEVICE).requires_grad_() for each in random)

    def forward_backward() -> None:
        losses(14 * images, captions).mean().backward()
        images.grad = captions.grad = None

    return forward_backward


class Largest(TorchDispatchMode):
    """Dispatch mode that records the bytes of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() * each.element_size() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.size = max(self.size, *sizes, 0)
        return result


def largest(work: Callable[[], None]) -> int:
    with Largest() as recorder:
        work()
    return recorder.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--preset", default="clip-vit-b16")
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    depth = options.depth
    shape = replace(PRESETS[options.preset], depth=depth, text_depth=depth, vocabulary=4096, length=LENGTH)
    steps = {WHOLE: whole_step(composed(shape, options.images, []))}
    for rate in RATES:
        steps[f"{100 * rate:g} % dropped"] = whole_step(
            composed(shape, options.images, [DropPatches(rate=rate, until=10)])
        )
    timings = side_by_side(steps, rounds=options.rounds, warmup=1)
    print_timings(
        f"training step, {options.preset}, {options.depth} blocks", timings, WHOLE, options.images, "images/s"
    )
    gains = {name: 1 / ratio(timings, name, WHOLE) for name in steps}
    print(*(f"  {name}: {gain:.2f} times as fast" for name, gain in gains.items()), sep="\n")
    losses = {MATRIX: loss_alone(contrastive_losses_reference, options.pairs)}
    losses["tiles"] = loss_alone(contrastive_losses, options.pairs)
    largest_tensor = {name: largest(work) for name, work in losses.items()}
    loss_timings = side_by_side(losses, rounds=options.rounds, warmup=1)
    print_timings(
        f"the loss of {options.pairs} pairs, forward and backward", loss_timings, MATRIX, options.pairs, "pairs/s"
    )
    print(*(f"  {name}: largest tensor {size / 2**20:.1f} MiB" for name, size in largest_tensor.items()), sep="\n")
    if options.json:
        facts = {"preset": options.preset, "blocks": options.depth, "images": options.images, "times_as_fast": gains}
        save_timings(
            options.json / f"flip-step-{DEVICE.type}.json", {"benchmark": "a step of FLIP", **facts}, timings, WHOLE
        )
        facts = {"benchmark": "the contrastive loss", "pairs": options.pairs, "largest_tensor": largest_tensor}
        save_timings(options.json / f"contrastive-loss-{DEVICE.type}.json", facts, loss_timings, MATRIX)


if __name__ == "__main__":
    main()
