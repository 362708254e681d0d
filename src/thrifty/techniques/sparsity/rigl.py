"""RigL: train at a fixed density, moving connections to where the gradient wants them.

Paper     Evci et al. 2020, Rigging the Lottery (arXiv 1911.11134), algorithm 1; ERK densities, section 3.
Promise   the same number of non-zero weights per layer at every step. Drops the smallest active weights, grows the
          inactive ones with the largest dense gradient at zero, cosine-annealed; that step makes no other update.
Cost      one more mask per weight. Masked dense products save no time: FLOPs saved are theoretical until a sparse
          kernel is used.
Avoid     with frozen base weights.
Note      the paper's text anneals by cosine, its code's default is constant; this follows the text. Biases, norms,
          embeddings and the head stay dense. Global-norm clipping sees the masked gradients only.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from thrifty.core.bounds import Positive, Probability, Share
from thrifty.core.errors import IntegrityError, Refused
from thrifty.core.layout import order_of
from thrifty.core.moments import Moment
from thrifty.core.sparsity import layer_densities, random_mask
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, fill_tensor, full_value
from thrifty.core.surgery import note
from thrifty.core.technique import Numerics, Technique
from thrifty.core.transforms import Numbers, Slots, Transform, above, under


def drop_fraction(step: int, alpha: float, until: int) -> float:
    """The share of connections moved at this step: alpha / 2 · (1 + cos(π step / until))."""
    return alpha / 2 * (1 + math.cos(math.pi * step / until)) if step < until else 0.0


def moved_mask(mask: Tensor, weight: Tensor, gradient: Tensor, fraction: float) -> Tensor:
    """The mask after dropping the `fraction` smallest |weight| of the active and growing as many inactive places
    (just-dropped ones included) with the largest |gradient|. All tensors have the weight's shape."""
    active = int(mask.sum())
    moved = round(fraction * active)
    if moved == 0 or active == mask.numel():
        return mask
    kept = torch.zeros_like(mask).flatten()
    magnitude = weight.abs().masked_fill(~mask, -1.0).flatten()
    kept[magnitude.topk(active - moved).indices] = True
    wanted = gradient.abs().flatten().masked_fill(kept, -1.0)
    kept[wanted.topk(moved).indices] = True
    return kept.view_as(mask)


class Masked(Transform):
    """The rest of the update under a mask: gradients before it, updates after it; every so often the mask moves."""

    name = "rigl"

    def __init__(self, rest: Transform, settings: "Rigl"):
        self.rest, self.settings = rest, settings
        self.masked: list[int] = []

    def numbers(self, step: int, age: int) -> dict[str, float]:
        s = self.settings
        due = step > 0 and step % s.every == 0 and step < int(s.until)
        fraction = drop_fraction(step, s.alpha, int(s.until)) if due else 0.0
        return {"fraction": fraction, **above("rest", self.rest.numbers(step, age))}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        densities = self.settings.densities(dict(zip(names, parameters, strict=True)))
        self.masked = [i for i, name in enumerate(names) if name in densities]
        masks = [parameter.new_empty(0, dtype=torch.bool) for parameter in parameters]
        for i in self.masked:
            masks[i] = random_mask(parameters[i], densities[names[i]], f"{self.settings.seed}/{names[i]}")
            parameters[i].detach().mul_(masks[i])
        return {"mask": masks, **above("rest", self.rest.init(names, parameters))}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor]:
        inner_slots = under("rest", slots)
        if numbers["fraction"]:
            self._move(updates, slots["mask"], inner_slots, parameters, float(numbers["fraction"]))
            return [torch.zeros_like(parameter) for parameter in parameters]
        self._apply(updates, slots["mask"])
        updates = self.rest.update(updates, inner_slots, parameters, under("rest", numbers))
        self._apply(updates, slots["mask"])
        return updates

    def follow(self, slots: Slots, parameters: list[Tensor], numbers: Numbers) -> None:
        self.rest.follow(under("rest", slots), parameters, under("rest", numbers))

    def judged(self, slots: Slots, parameters: list[Tensor], numbers: Numbers) -> list[Tensor] | None:
        return self.rest.judged(under("rest", slots), parameters, under("rest", numbers))

    def rate(self, numbers: Numbers) -> float:
        return self.rest.rate(under("rest", numbers))

    def _apply(self, tensors: list[Tensor], masks: list[Tensor]) -> None:
        for i in self.masked:
            tensors[i].mul_(masks[i])

    def _move(
        self, gradients: list[Tensor], masks: list[Tensor], inner: Slots, parameters: list[Tensor], fraction: float
    ) -> None:
        for i in self.masked:
            # decided on whole tensors, so that every rank of a sharded run decides the same
            order = order_of(parameters[i])
            new = moved_mask(*(full_value(t, order) for t in (masks[i], parameters[i], gradients[i])), fraction)
            fill_tensor(masks[i], new)
            parameters[i].mul_(masks[i])
            for tensors in inner.values():
                if tensors[i].shape == parameters[i].shape:
                    tensors[i].mul_(masks[i])


@dataclass(frozen=True)
class Rigl(Technique):
    stage, numerics = Stage.SPARSITY, Numerics.DIFFERENT
    claims = frozenset({"weight masks"})
    clashes: ClassVar[Mapping[str, str]] = {"frozen base weights": "it moves weights that adapters keep frozen"}

    density: Share = 0.2
    """Kept fraction of the weights in the blocks' matrices, in (0, 1]."""
    distribution: Literal["erk", "uniform"] = "erk"
    every: Positive = 100
    """Steps between moves."""
    alpha: Probability = 0.3
    """Share of the active connections moved at first."""
    until: Moment = 0.75
    where: str = r"\.\d+\."
    """Pattern of the names of masked matrices; those of numbered blocks by default."""
    seed: int = 0

    def model(self, model: nn.Module) -> nn.Module:
        densities = self.densities(dict(model.named_parameters()))
        if not densities:
            raise Refused(f"no matrix has a name that matches {self.where!r}", fix="give another pattern as where")
        note(f"{len(densities)} matrices; embeddings, norms, biases and the head stay dense")
        return model

    def densities(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """The density of each parameter that is masked, by name."""
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in parameters.items()
            if parameter.ndim == 2 and re.search(self.where, name)
        }
        return layer_densities(shapes, self.density, self.distribution)

    def update(self, transform: Transform) -> Transform:
        return Masked(transform, self)

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        parameters = dict(state.model.named_parameters())
        for name, density in self.densities(parameters).items():
            weight = full_value(parameters[name])
            found, allowed = int(weight.count_nonzero()), round(density * weight.numel())
            if found > allowed:
                raise IntegrityError(f"{self.name}: {name} has {found} non-zero weights, at most {allowed} promised")
