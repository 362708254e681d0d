"""Base classes of techniques with weight masks. Each technique implements a `MaskPolicy`."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.gradient_transform import MASK_MOVE, GradientTransform, Scalars, Slots, StateAge
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import MovingMoment, refuse_shares
from thrifty.core.setting_bounds import Fraction, Positive, Probability, check_pattern, set_pattern
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, full_value
from thrifty.core.technique import Numerics, Technique
from thrifty.distributed.stage_communication import merge_over_stages
from thrifty.modeling.module_surgery import computes_weight, is_under
from thrifty.optim.mask_selection import (
    Shapes,
    drop_fraction,
    full_mask,
    global_count,
    largest_of_all,
    layer_counts,
    masked_shapes,
    random_masks,
)
from thrifty.optim.weight_masks import LayerReader, MaskedUpdate, MaskPolicy, check_masks, mask_of, masks_in


class DensityLogger:
    """A backward pass that records the density of all masks, and the number of weight matrices whose mask is empty."""

    def __init__(self, inner: Backward):
        self.inner = inner
        self.known = WeakIdKeyDictionary()
        """For each mask, the version at which its elements were counted, and the number of kept elements."""

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = self.inner(model, objective, batch)
        masks = [mask for parameter in model.parameters() if (mask := mask_of(parameter)) is not None]
        # a pipeline stage has only its own blocks, and fake masks have no values
        if not masks or axis("pipeline").size > 1 or isinstance(masks[0], FakeTensor):
            return outcome
        counts = [self._count(mask) for mask in masks]
        density = sum(counts) / sum(mask.numel() for mask in masks)
        notes = {"density": density, "empty_weights": float(counts.count(0))}
        return replace(outcome, notes=outcome.notes | notes)

    def _count(self, mask: Tensor) -> int:
        version, count = self.known.get(mask, (-1, 0))
        if version != mask._version:
            count = int(mask.sum())
            self.known[mask] = mask._version, count
        return count


class MaskTechnique(Technique):
    """A technique that implements `MaskPolicy`. Masks are fixed unless a subclass changes them."""

    stage, numerics = Stage.SPARSITY, Numerics.DIFFERENT
    claims = frozenset({Claim.WEIGHT_MASKS})
    needs_names = True
    clashes: ClassVar[Mapping[Claim, str]] = {Claim.FROZEN_BASE_WEIGHTS: "it masks weights that adapters keep frozen"}
    replaces_update: ClassVar[bool] = True

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def backward(self, backward: Backward) -> Backward:
        return DensityLogger(backward)

    def update(self, transform: GradientTransform) -> GradientTransform:
        refuse_shares(self, self.name)  # in the user's own training loop
        return MaskedUpdate(transform, self)

    def masked(self, shapes: Shapes) -> list[str]:
        raise NotImplementedError

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def moves_at(self, step: int) -> bool:
        return False

    def idle_in(self, steps: int) -> str:
        is_static = type(self).moves_at is MaskTechnique.moves_at
        return "" if is_static or any(map(self.moves_at, range(steps))) else "masks never move"

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        return iter(())


class MatrixMaskTechnique(MaskTechnique):
    """A technique that masks the matrices whose names match a pattern. All mask elements are True at first."""

    density: Fraction = 0.2
    """Fraction of nonzero weights in the blocks' matrices, in (0, 1]."""
    where: str = r"\.\d+\."
    """Regular expression that is searched in parameter names to choose the masked matrices; by default matrices in
    numbered blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self, self.name, "where")

    def model(self, model: nn.Module) -> nn.Module:
        parameters = dict(model.named_parameters())
        tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        chosen = self.masked(masked_shapes(parameters))
        if not chosen:
            others = [name for name in masked_shapes(parameters) if name not in tables]
            raise RefusedError(
                f"no matrix has a name that matches {self.where!r}",
                fix=set_pattern(self.name, others, tables),
            )
        if self.where == type(self).where and (inside := tables.intersection(chosen)):
            raise RefusedError(
                f"{self.where!r} would mask the embedding {min(inside)!r}, and first prune the rows of tokens that the "
                "batch lacks",
                fix=f"where = '^(?!{'|'.join(map(re.escape, sorted(inside)))}).*{self.where}'",
            )
        computed = [name for name, module in model.named_modules() if computes_weight(module)]
        if parts := [name for name in chosen if any(is_under(name, layer) for layer in computed)]:
            raise RefusedError(
                f"{self.where!r} would mask {parts[0]!r}, from which a weight is computed; zeros there are not "
                "zeros of the weight",
                fix="set where to a pattern without such layers; or remove weight_norm and the like from the model",
            )
        dense = [name for name, each in parameters.items() if each.ndim > 1 and name not in chosen]
        left = ", ".join(dict.fromkeys(re.sub(r"\d+", "N", name) for name in dense))
        also = f", and {left}" if left else ""
        add_note(f"{len(chosen)} matrices, such as {chosen[0]}; norms and biases stay dense{also}")
        return model

    def masked(self, shapes: Shapes) -> list[str]:
        return [name for name in shapes if re.search(self.where, name)]

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: full_mask(parameter) for name, parameter in parameters.items()}

    def shapes(self, state: TrainState) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the masked weights in a training state, by name."""
        assert state.optimizer is not None
        all_shapes = masked_shapes(dict(zip(state.optimizer.names, state.optimizer.parameters, strict=True)))
        return {name: all_shapes[name] for name in self.masked(all_shapes)}

    def allowed(self, state: TrainState, density: float, distribution: str) -> dict[str, int]:
        """Return the maximum number of unmasked weights of each layer.

        After a growth step, masks come from the smaller model. ERK densities of the larger model can differ if stacks
        grow in different proportions, so 10 % more weights are allowed.
        """
        counts = layer_counts(self.shapes(state), density, distribution)
        if distribution == "erk" and any(entry.step for entry in state.log):
            return {name: math.ceil(1.1 * count) for name, count in counts.items()}
        return counts

    def check_total(self, state: TrainState, density: float) -> None:
        """Raise IntegrityError if the masked weights, or their masks, have more nonzero elements than `density` allows.

        After a structural change the density is not checked.
        """
        assert state.optimizer is not None
        if any(entry.step for entry in state.log):
            return
        shapes = self.shapes(state)
        parameters = dict(zip(state.optimizer.names, state.optimizer.parameters, strict=True))
        nonzero = _nonzero({name: parameters[name] for name in shapes})
        if nonzero > (most := global_count(shapes, density)):
            raise IntegrityError(f"{self.name}: {nonzero} weights are nonzero, and at most {most} are allowed")
        kept = _nonzero(masks_in(state))
        if kept > most:
            raise IntegrityError(f"{self.name}: masks keep {kept} weights, and at most {most} are allowed")


def _nonzero(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of nonzero elements of tensors, summed over all pipeline stages."""
    counts = {name: int(full_value(tensor).count_nonzero()) for name, tensor in tensors.items()}
    return sum(merge_over_stages(counts).values())


class DynamicMaskTechnique(MatrixMaskTechnique):
    """A technique whose random masks change during the run: once in `every` steps, some connections are dropped and
    grown."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it drops and grows weights that adapters keep frozen"
    }

    distribution: Literal["erk", "uniform"] = "erk"
    """Density of each layer: "erk" (Erdős–Rényi, larger for small matrices), or "uniform", the same density for all
    layers."""
    every: Positive = 100
    """Number of steps between drop-and-grow steps."""
    alpha: Probability = 0.3
    """Initial fraction of active connections that a drop-and-grow step replaces; annealed by cosine."""
    until: MovingMoment = 0.75
    seed: int = 0

    def model(self, model: nn.Module) -> nn.Module:
        if not self.moves_at(self.every):
            add_note(
                f"masks never move: every {self.every} steps, until step {int(self.until)}, with alpha {self.alpha:g}"
            )
        return super().model(model)

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return random_masks(parameters, self.density, self.distribution, self.seed)

    def moves_at(self, step: int) -> bool:
        return 0 < step < int(self.until) and step % self.every == 0 and self.fraction(step) > 0

    def fraction(self, step: int) -> float:
        """Return the fraction of active connections that a step drops and grows."""
        return drop_fraction(step, self.alpha, int(self.until))

    def holds(self, state: TrainState) -> None:
        check_masks(self.name, state, self.allowed(state, self.density, self.distribution))


class SaliencyMaskedUpdate(MaskedUpdate):
    """An update that keeps all weights during the scoring steps, and then selects masks by their summed gradients."""

    def __init__(self, rest: GradientTransform, masking: MaskPolicy, steps: int):
        super().__init__(rest, masking)
        self.steps = steps

    def scalars(self, step: int, age: int) -> dict[str, float]:
        # moments start after scoring, so scoring steps do not count in Adam's bias correction
        scored = max(min(step, self.steps) - (step - age), 0)
        whole = age if isinstance(age, StateAge) else StateAge(age)
        return {"scoring": float(step < self.steps), **super().scalars(step, whole.less(scored))}

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        slots = super().init(names, parameters)
        sums = [parameter.new_empty(0) for parameter in parameters]
        if self.steps > 1:
            for i in self.names:
                sums[i] = torch.zeros_like(parameters[i])
        return {"sum": sums, **slots}

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        if numbers["scoring"] and self.steps > 1:
            sums = slots["sum"]
            for i in self.names:
                updates[i] = sums[i].add_(updates[i])
        if numbers["scoring"] and not numbers[MASK_MOVE]:
            return [torch.zeros_like(parameter) for parameter in parameters]
        updates = super().update(updates, slots, parameters, numbers)
        if numbers["scoring"]:
            for i in self.names:
                slots["sum"][i].zero_()
        return updates


class SaliencyMaskTechnique(MatrixMaskTechnique):
    """A technique whose masks are chosen once, over all layers, by gradients of the first steps."""

    density: Fraction = 0.1
    scoring_steps: Positive = 1
    """Number of steps whose gradients are summed and scored. These steps do not update weights."""

    def scores(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the score of each weight, in the weight's shape. Weights with the largest scores are kept."""
        raise NotImplementedError

    def update(self, transform: GradientTransform) -> GradientTransform:
        return SaliencyMaskedUpdate(transform, self, self.scoring_steps)

    def moves_at(self, step: int) -> bool:
        return step == self.scoring_steps - 1

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        matrices = ((name, layer(name)) for name in names)
        scores = {name: self.scores(matrix.weight, matrix.gradient) for name, matrix in matrices}
        count = global_count({name: tuple(values.shape) for name, values in scores.items()}, self.density)
        yield from largest_of_all(scores, count).items()

    def holds(self, state: TrainState) -> None:
        assert state.optimizer is not None
        check_masks(self.name, state, {})
        if state.optimizer.updates >= self.scoring_steps:
            self.check_total(state, self.density)
