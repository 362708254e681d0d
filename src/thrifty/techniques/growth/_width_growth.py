"""Feed-forward networks that start with fewer inner units than they end with, and grow by duplicating them.

An inner unit is a row of the layers before the last one of the branch and a column of the last. A unit that is copied
gives what its origin gives; if what all of them write together is what the origin wrote, the network computes the same
(Chen et al. 2016, Net2Net, arXiv 1511.05641, section 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.modeling.residual_branches import ResidualBranch, find_branches, in_width, is_transposed, out_width


def copied_units(old: int, new: int) -> Tensor:
    """Which of the old units each of the new ones copies, (new,): all of them in turn."""
    return torch.arange(new) % old


def duplicate_units(value: Tensor, dim: int, new: int, parts: int = 1) -> Tensor:
    """A tensor with its units along `dim` duplicated, so that there are `new`; `parts` layers one after the other (gate
    and value) have a unit each."""
    old = value.shape[dim] // parts
    units = copied_units(old, new // parts)
    return value.index_select(dim, torch.cat([part * old + units for part in range(parts)]).to(value.device))


def divide_outputs(value: Tensor, dim: int, old: int, spread: float, key: str) -> Tensor:
    """What duplicated units write, divided among the copies of each of `old` units along `dim`: each has an equal share
    of the origin's, plus noise of `spread` times the deviation of all, whose sum over the copies of a unit is zero.

    Copies with equal shares receive equal gradients, and stay equal for ever: with noise they part.
    """
    origin = copied_units(old, value.shape[dim]).to(value.device)
    copies = torch.bincount(origin, minlength=old).to(value.dtype)
    noise = torch.randn(value.shape, generator=keyed_generator(key, value), device=value.device, dtype=value.dtype)
    noise = noise * spread * value.std()
    total = torch.zeros_like(value.narrow(dim, 0, old)).index_add_(dim, origin, noise)
    along = [-1 if each == dim else 1 for each in range(value.ndim)]
    mean = (total / copies.view(along)).index_select(dim, origin)
    return value / copies[origin].view(along) + noise - mean


@dataclass(frozen=True)
class InnerUnits:
    """How the units of a feed-forward network lie in one of its parameters."""

    units: int
    parts: int
    """Layers of so many units one after the other."""
    writes: bool
    """Whether it is the weight of the last layer, which has units along the dim that it takes."""
    dim: int


def inner_parameters(model: nn.Module) -> dict[str, InnerUnits]:
    """Every parameter with a dim of inner units, by its name inside a block. Raises RefusedError for a network that
    cannot be taken apart."""
    return {
        name.removeprefix(f"{stack}.").partition(".")[2]: inner
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
            raise RefusedError(f"{name} does not give the {units} units that {branch.name} takes", fix="set width=1")
        for own, parameter in layer.named_parameters(recurse=False):
            dim = parameter.ndim - 1 if is_transposed(layer) else 0
            yield f"{name}.{own}", layer, InnerUnits(units, parts, False, dim)
    yield f"{branch.name}.weight", branch.last, InnerUnits(units, 1, True, 0 if is_transposed(branch.last) else 1)


def narrow_networks(model: nn.Module, divisor: int) -> None:
    """Leave the first of the inner units of every feed-forward network, their number divided by `divisor`."""
    if divisor == 1:
        return
    for blocks in find_branches(model).values():
        for branch in (branch for block in blocks for branch in block if branch.kind == "mlp"):
            layers = [*_inner(branch)]
            if not layers[:-1]:
                raise RefusedError(f"{branch.name} has no layer in front of it to be narrowed", fix="set width=1")
            for name, layer, inner in layers:
                _keep_first(layer, name.rpartition(".")[2], inner, max(inner.units // divisor, 1))


def _keep_first(layer: nn.Module, name: str, inner: InnerUnits, units: int) -> None:
    old = getattr(layer, name)
    places = torch.cat([part * inner.units + torch.arange(units) for part in range(inner.parts)])
    kept = old.detach().index_select(inner.dim, places.to(old.device))
    setattr(layer, name, nn.Parameter(kept, old.requires_grad))
    if isinstance(parts := getattr(layer, "parts", None), dict) and not inner.writes:
        layer.parts = dict.fromkeys(parts, units)
    for word in ("in_features", "nx") if inner.writes else ("out_features", "nf"):
        if hasattr(layer, word):
            setattr(layer, word, units * inner.parts)
