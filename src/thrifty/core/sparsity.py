"""What sparse techniques share: how a global density is spread over layers, and random masks keyed by name."""

from collections.abc import Mapping

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.layout import in_order, order_of
from thrifty.core.randomness import keyed_generator
from thrifty.core.state import fill_tensor
from thrifty.core.transit import over_stages


def layer_densities(shapes: Mapping[str, tuple[int, ...]], density: float, distribution: str) -> dict[str, float]:
    """The density of each layer such that the kept weights sum to `density` of all.

    "uniform" gives each the same. "erk" (Evci et al. 2020) gives eps · (sum of dims) / (product of dims), solving for
    eps; a layer that would exceed 1 becomes dense and eps is solved again for the rest. Layers of other pipeline stages
    count among all.
    """
    own, shapes = shapes, over_stages(shapes)
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


def random_mask(parameter: Tensor, density: float, key: str) -> Tensor:
    """A boolean mask like `parameter` (sharded as it is) with round(density · numel) places, drawn from `key` alone."""
    generator = keyed_generator(key)
    mask = torch.zeros(parameter.numel(), dtype=torch.bool)
    mask[torch.randperm(mask.numel(), generator=generator)[: round(density * mask.numel())]] = True
    kept = in_order(torch.empty_like(parameter, dtype=torch.bool), order_of(parameter))
    fill_tensor(kept, mask.view(parameter.shape))
    return kept
