"""Mask selection for sparse techniques: layer densities, largest weights, replaced connections, random masks."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.randomness import keyed_generator
from thrifty.core.shard_layout import order_of, tag_order
from thrifty.core.state import fill_tensor
from thrifty.distributed.stage_communication import gather_over_stages, merge_over_stages
from thrifty.modeling.parameter_kinds import is_matrix

Shapes = Mapping[str, tuple[int, ...]]


def masked_shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that can be masked, by name: all matrices except position embeddings."""
    return {
        name: tuple(parameter.shape)
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and is_matrix(name, parameter)
    }


def layer_densities(shapes: Shapes, density: float, distribution: str) -> dict[str, float]:
    """Return the density of each layer. The kept weights are the fraction `density` of all weights.

    "uniform" sets the same density for each layer. "erk" (Evci et al. 2020) sets it to eps · (sum of dims) / (product
    of dims) and solves for eps. A layer whose density would exceed 1 becomes dense, and eps is solved again for the
    remaining layers. Layers of other pipeline stages are included.
    """
    own, shapes = shapes, merge_over_stages(shapes)
    if distribution == "uniform" or not shapes:
        return dict.fromkeys(own, density)
    if distribution != "erk":
        raise UsageError(f"unknown distribution {distribution!r}", fix='use "erk" or "uniform"')
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    dense: set[str] = set()
    while True:
        rest = [name for name in shapes if name not in dense]
        budget = density * sum(sizes.values()) - sum(sizes[name] for name in dense)
        eps = budget / sum(sum(shapes[name]) for name in rest) if rest else 0.0
        over = {name for name in rest if eps * sum(shapes[name]) >= sizes[name]}
        if not over:
            return {name: 1.0 if name in dense else eps * sum(shapes[name]) / sizes[name] for name in own}
        dense |= over


def layer_counts(shapes: Shapes, density: float, distribution: str) -> dict[str, int]:
    """Return the number of weights that each layer keeps."""
    densities = layer_densities(shapes, density, distribution)
    return {name: round(densities[name] * torch.Size(shape).numel()) for name, shape in shapes.items()}


def global_count(shapes: Shapes, density: float) -> int:
    """Return the number of weights that all layers together keep, including layers of other pipeline stages."""
    return round(density * sum(torch.Size(shape).numel() for shape in merge_over_stages(shapes).values()))


def random_mask(parameter: Tensor, density: float, key: str) -> Tensor:
    """Return a random boolean mask, sampled with `key` and sharded like `parameter`. It has round(density · numel) True
    values.
    """
    generator = keyed_generator(key)
    mask = torch.zeros(parameter.numel(), dtype=torch.bool)
    mask[torch.randperm(mask.numel(), generator=generator)[: round(density * mask.numel())]] = True
    return shard_like_parameter(mask.view(parameter.shape), parameter)


def random_masks(parameters: Mapping[str, Tensor], density: float, distribution: str, seed: int) -> dict[str, Tensor]:
    """Return a random mask for each parameter with the density of its layer. The mask depends only on (seed, name)."""
    densities = layer_densities(masked_shapes(parameters), density, distribution)
    return {name: random_mask(each, densities[name], f"{seed}/{name}") for name, each in parameters.items()}


def full_mask(parameter: Tensor) -> Tensor:
    """Return a mask of True values in the shape of `parameter`, sharded like `parameter`."""
    return shard_like_parameter(torch.ones(parameter.shape, dtype=torch.bool), parameter)


def shard_like_parameter(mask: Tensor, parameter: Tensor) -> Tensor:
    """Return a mask sharded like its parameter, from a whole mask of the same shape that every rank has."""
    sharded = tag_order(torch.empty_like(parameter, dtype=torch.bool), order_of(parameter))
    fill_tensor(sharded, mask)
    return sharded


def largest(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest scores, in the shape of `scores`. Among equal scores, the first are kept."""
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[scores.flatten().sort(descending=True, stable=True).indices[:count]] = True
    return mask.view_as(scores)


def largest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return masks of the `count` largest scores over all layers together, including layers of other pipeline stages.

    All layers share one threshold. Among equal scores, the first are kept, in the order of names.
    """
    all_scores = gather_over_stages(scores, merge_over_stages(dict.fromkeys(scores)))
    names = sorted(all_scores)
    if not names:
        return {}
    mask = largest(torch.cat([all_scores[name].flatten() for name in names]), count)
    parts = dict(zip(names, mask.split([all_scores[name].numel() for name in names]), strict=True))
    return {name: parts[name].view_as(values) for name, values in scores.items()}


def replace_connections(mask: Tensor, worth: Tensor, promise: Tensor, fraction: float) -> Tensor:
    """Return the mask after dropping active connections and growing the same number of inactive connections.

    Drops the `fraction` of active positions with the smallest `worth`. Grows the inactive positions with the largest
    `promise`; dropped positions may grow again. All tensors have the same shape. `worth` and `promise` are not
    negative.
    """
    active = int(mask.sum())
    moved = round(fraction * active)
    if moved == 0 or active == mask.numel():
        return mask
    kept = torch.zeros_like(mask).flatten()
    kept[worth.masked_fill(~mask, -1.0).flatten().topk(active - moved).indices] = True
    kept[promise.flatten().masked_fill(kept, -1.0).topk(moved).indices] = True
    return kept.view_as(mask)


def drop_fraction(step: int, alpha: float, until: int) -> float:
    """Return the fraction of connections to replace at this step: alpha / 2 · (1 + cos(π step / until))."""
    return alpha / 2 * (1 + math.cos(math.pi * step / until)) if step < until else 0.0
