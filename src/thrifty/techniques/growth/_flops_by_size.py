"""FLOPs of a training step for a given depth and length, counted from shapes."""

import math
from collections.abc import Mapping

from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.modeling.embeddings import find_head
from thrifty.modeling.image_sizes import images_of
from thrifty.modeling.layer_shapes import in_width
from thrifty.modeling.module_surgery import find_stacks, weight_layers
from thrifty.modeling.parameter_kinds import is_matrix


def positions_of(model: nn.Module, batch: Batch) -> int:
    """Return the number of positions of an example.

    Positions are tokens with a prediction, or patches of the model's first convolution; 0 for other examples.
    """
    if "tokens" in batch.fields:
        return batch["tokens"].shape[1] - 1
    images = images_of(batch)
    if images is None:
        return 0
    strides = [module.stride for module in model.modules() if isinstance(module, nn.Conv2d)]
    return math.prod(images.shape[-2:]) // math.prod(strides[0] if strides else (1, 1))


def step_flops(model: nn.Module, depths: Mapping[str, int], positions: float) -> float:
    """Return the FLOPs of a forward and backward pass of one example, with `depths[stack]` blocks in each stack.

    Each element of a weight matrix costs 6 FLOPs per position, also in the output head. The attention of a block costs
    12 · width · positions² FLOPs. Embeddings cost nothing.
    """
    stacks, head = find_stacks(model), find_head(model)
    flops = 6 * positions * head[1].weight.numel() if head else 0.0
    for stack, depth in depths.items():
        block = stacks[stack][0]
        weights = sum(p.numel() for name, p in block.named_parameters() if is_matrix(name, p))
        layers = list(weight_layers(block).values())
        if not layers:
            raise RefusedError(
                f"{type(block).__name__} has no linear layer with a weight, so its width is unknown",
                fix="--with growth.compound; or --with growth.stacking",
            )
        width = in_width(layers[0])
        flops += depth * (6 * positions * weights + 12 * width * positions**2)
    return flops
