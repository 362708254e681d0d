"""Growth in width: duplicate the inner units (neurons) of feed-forward networks.

A unit is one output of the first layers and one input of the last layer. A copied unit has the same activation as the
old unit. The function is unchanged if the outgoing weights of all copies sum to the outgoing weights of the old unit
(Chen et al. 2016, Net2Net, arXiv 1511.05641, section 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.modeling.layer_shapes import in_width, is_transposed, out_width
from thrifty.modeling.residual_branches import ResidualBranch, find_branches


def copied_units(old: int, new: int) -> Tensor:
    """Return the index of the old unit that each new unit duplicates, (new,). Old units repeat cyclically."""
    return torch.arange(new) % old


def duplicate_units(value: Tensor, dim: int, new: int, parts: int = 1) -> Tensor:
    """Duplicate units along `dim` until there are `new` units, separately in each of `parts` fused layers."""
    old = value.shape[dim] // parts
    units = copied_units(old, new // parts)
    return value.index_select(dim, torch.cat([part * old + units for part in range(parts)]).to(value.device))


def divide_outputs(value: Tensor, dim: int, old: int, spread: float, key: str) -> Tensor:
    """Divide outgoing weights along `dim` among the copies of each of `old` units.

    Each copy receives an equal part plus noise. The standard deviation of the noise is `spread` times the standard
    deviation of all weights. The noise sums to zero over the copies of a unit. Without noise, copies receive equal
    gradients and stay equal.
    """
    origin = copied_units(old, value.shape[dim]).to(value.device)
    copies = torch.bincount(origin, minlength=old).to(value.dtype)
    noise = torch.randn(value.shape, generator=keyed_generator(key, value), device=value.device, dtype=value.dtype)
    noise = noise * spread * value.std()
    total = torch.zeros_like(value.narrow(dim, 0, old)).index_add_(dim, origin, noise)
    broadcast = [-1 if each == dim else 1 for each in range(value.ndim)]
    mean = (total / copies.view(broadcast)).index_select(dim, origin)
    return value / copies[origin].view(broadcast) + noise - mean


@dataclass(frozen=True)
class InnerUnits:
    """Layout of a feed-forward network's units in one parameter."""

    units: int
    parts: int
    """Number of fused layers, each with `units` units."""
    writes: bool
    """True for the weight of the last layer, where the units are inputs."""
    dim: int


def inner_parameters(model: nn.Module) -> dict[tuple[str, str], InnerUnits]:
    """Return the layout of every parameter that has a dim of inner units. Keys are (stack, name inside a block),
    because stacks may have different widths.

    Raises RefusedError if the size of a layer is not a multiple of the number of units.
    """
    return {
        (stack, name.removeprefix(f"{stack}.").partition(".")[2]): inner
        for stack, blocks in find_branches(model).items()
        for branch in blocks[0]
        if branch.kind == "mlp"
        for name, _, inner in _inner(branch)
    }


def _inner(branch: ResidualBranch) -> Iterator[tuple[str, nn.Module, InnerUnits]]:
    units = in_width(branch.last)
    for name, layer in branch.inner.items():
        parts, rest = divmod(out_width(layer), units)
        if rest or not parts:
            raise RefusedError(
                f"the output size of {name} is not a multiple of the {units} units of {branch.name}",
                fix="--set techniques.growth.compound.width=1",
            )
        for leaf, parameter in layer.named_parameters(recurse=False):
            dim = parameter.ndim - 1 if is_transposed(layer) else 0
            yield f"{name}.{leaf}", layer, InnerUnits(units, parts, False, dim)
    yield f"{branch.name}.weight", branch.last, InnerUnits(units, 1, True, 0 if is_transposed(branch.last) else 1)


def narrow_networks(model: nn.Module, divisor: int) -> None:
    """Keep the first 1 / `divisor` of the units of every feed-forward network, at least one unit."""
    if divisor == 1:
        return
    for blocks in find_branches(model).values():
        for branch in (branch for block in blocks for branch in block if branch.kind == "mlp"):
            layers = [*_inner(branch)]
            if not layers[:-1]:
                raise RefusedError(
                    f"{branch.name} has no earlier layer to make narrower",
                    fix="--set techniques.growth.compound.width=1",
                )
            for name, layer, inner in layers:
                _keep_first(layer, name.rpartition(".")[2], inner, max(inner.units // divisor, 1))


def _keep_first(layer: nn.Module, name: str, inner: InnerUnits, units: int) -> None:
    old = getattr(layer, name)
    rows = torch.cat([part * inner.units + torch.arange(units) for part in range(inner.parts)])
    values = old.detach().index_select(inner.dim, rows.to(old.device))
    setattr(layer, name, nn.Parameter(values, old.requires_grad))
    if isinstance(parts := getattr(layer, "parts", None), dict) and not inner.writes:
        layer.parts = dict.fromkeys(parts, units)
    for word in ("in_features", "nx") if inner.writes else ("out_features", "nf"):
        if hasattr(layer, word):
            setattr(layer, word, units * inner.parts)
