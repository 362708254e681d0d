"""Early-bird tickets (You et al. 2020): select heads and neurons early in training, then train the smaller model.

Paper       You et al. 2020, Drawing Early-Bird Tickets (arXiv 1909.11957). Transformers: Chen et al. 2021, EarlyBERT
            (arXiv 2101.00063).
Promise     By default the smaller model has a third fewer heads per block and 40 % fewer neurons in total. Its matrices
            shrink, and heads keep their width.
Use         run = thrifty.train(model, texts, held_out=held_out, techniques=["early_bird"], budget="2000 steps")
Start with  `early_bird:heads=0.5,neurons=0.4`. Compare it with the control `criterion=random`.
Cost        The search trains the whole model and discards these updates. The steps of the search count in the budget.
Avoid       Fewer than three heads per block, because the default then removes one of two heads. Conclusions without the
            random control.
Does not    Keep the weights of the search, or restart data or schedule; the smaller model trains from its initial
            weights with a fresh optimizer.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Positive, Probability, Rate, SettingBound
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, full_value
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.structured_pruning import (
    KINDS,
    Kind,
    PrunableUnits,
    add_coefficients,
    coefficients_of,
    find_units,
    fold_coefficients,
    prune_units,
)
from thrifty.optim.mask_selection import largest, largest_of_all
from thrifty.optim.transform_elements import SelectiveTransform

Part = Annotated[float, SettingBound(least=0, below=1)]
Draw = Literal["coefficients", "random", "late"]
SEARCH, TRAIN = "search", "train"
KIND_OF_PIECES: ModuleNote[str] = ModuleNote("kind_of_pieces")
"""Kind of the units ("heads" or "neurons") whose coefficients an output layer has."""
KEPT_PIECES: ModuleNote[Mapping[str, Any]] = ModuleNote("kept_pieces")
"""The ticket of a model, after its selection. The ticket is the kept heads and neurons."""


def kept_of_each(scores: Mapping[str, Tensor], removed: float) -> dict[str, Tensor]:
    """Return a mask (n,) of the kept heads or neurons for each layer, compared within the layer.

    The fraction `removed` with the smallest scores in a layer is dropped, but at least one stays.
    """
    return {name: largest(each, max(len(each) - round(removed * len(each)), 1)) for name, each in scores.items()}


def kept_of_all(scores: Mapping[str, Tensor], removed: float) -> dict[str, Tensor]:
    """Return a mask (n,) of the kept heads or neurons for each layer, compared over all layers.

    The fraction `removed` with the smallest scores is dropped, but the best in each layer stays.
    """
    total = sum(len(each) for each in scores.values())
    best = {name: each.masked_fill(largest(each, 1), torch.inf) for name, each in scores.items()}
    return largest_of_all(best, max(total - round(removed * total), len(scores)))


def mask_distance(masks: Tensor) -> float:
    """Return the largest fraction of elements in which one of the older masks differs from the newest mask.

    `masks` (q, n) has q masks of n elements, the newest first.
    """
    return float((masks[1:] != masks[0]).float().mean(1).max()) if len(masks) > 1 else 0.0


def as_hex(mask: Tensor) -> str:
    """Return a mask (n,) as hexadecimal text."""
    bits = "".join("01"[bit] for bit in mask.tolist())
    return f"{int(bits, 2):0{-(-len(bits) // 4)}x}"


def from_hex(text: str, count: int) -> list[int]:
    """Return the indices of the True elements of a hexadecimal mask of `count` elements."""
    return [place for place, bit in enumerate(f"{int(text, 16):0{count}b}") if bit == "1"]


def prune_model(model: nn.Module, kept: Mapping[str, Any], kinds: Collection[Kind] = KINDS) -> None:
    """Remove the heads and neurons (only `kinds`) of a model that are not in the ticket `kept`. The model must not be
    divided among ranks."""
    for name, pieces in find_units(model, kinds).items():
        prune_units(pieces, kept[name] if pieces.kind == "heads" else from_hex(kept[name], pieces.count))


def _has_units(model: nn.Module, kind: Kind) -> bool:
    try:
        return bool(find_units(model, {kind}))
    except RefusedError:
        return False


class AddSignPenalty(SelectiveTransform):
    """Add the gradient of penalty · |c| to the gradient of each coefficient c."""

    name = "add_signs"
    reach = TransformScope.ROWS

    def __init__(self, penalty: float):
        super().__init__(lambda name, parameter: name.endswith(".coefficients"))
        self.penalty = penalty

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        for i in self.chosen:
            updates[i].add_(parameters[i].sign(), alpha=self.penalty)
        return updates


class EarlyBirdBackward:
    """A backward pass that computes masks from the coefficients in one of `spacing` calls.

    `state` has the number of calls. The recent masks are buffers of the layers with coefficients.
    """

    def __init__(self, inner: Backward, settings: "EarlyBird"):
        self.inner, self.settings = inner, settings
        self.state = {"calls": torch.zeros((), dtype=torch.int64)}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome, counter = self.inner(model, objective, batch), self.state["calls"]
        if is_fake(counter):
            return outcome
        calls = int(counter)
        counter.add_(1)
        if not calls or calls % self.settings.spacing or not coefficients_of(model):
            return outcome
        self.settings.remember(model)
        known = calls // self.settings.spacing
        if known < 2:
            return outcome
        distances = self.settings.distances(model, min(known, self.settings.queue))
        notes = {f"mask_distance_of_{kind}": distance for kind, distance in distances.items()}
        return replace(outcome, notes=outcome.notes | notes)


class EarlyBird(Technique):
    """The output of each head and neuron is multiplied by a coefficient. Coefficients start at 1, with an L1 penalty
    and without weight decay. Every `every` steps the coefficients yield a mask of the heads and neurons to keep. The
    ticket (the mask for training) is selected when the newest of five masks agrees with the other four. The masks agree
    if they differ in less than a tenth of the heads and of the neurons. Heads that share keys and values are selected
    together. The smaller model is exported in its smaller shapes.

    Differs from EarlyBERT's code: the code keeps the largest signed coefficients at a fixed step. Here the largest
    magnitudes are kept, and the mask distance determines the step. `criterion` has two controls. "random" keeps the
    same number of random heads and neurons per block, at the same step. "late" selects the ticket at the step `latest`.
    """

    stage, numerics = Stage.SPARSITY, Numerics.DIFFERENT
    claims = frozenset({Claim.HEADS_AND_NEURONS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "its coefficients would be frozen, and it retrains the base weights",
        Claim.WEIGHT_MASKS: "masks have a fixed size, and it shrinks the matrices",
        Claim.DEPTH: "a ticket covers all blocks, from their initialization",
        Claim.WIDTH: "both change the width of the blocks",
        Claim.TENSOR_PARALLELISM: "a ticket covers whole layers",
        Claim.PIPELINE_PARALLELISM: "a ticket covers all blocks together",
        Claim.SHARED_PARAMETERS: "each block keeps its own heads and neurons",
    }

    heads: Part = 1 / 3
    """Removed fraction of the heads of each block. With 0, attention stays unchanged."""
    neurons: Part = 0.4
    """Removed fraction of the feed-forward neurons. With 0, feed-forward networks stay unchanged."""
    spread: Literal["global", "layerwise"] = "global"
    """Scope of the comparison of neurons: all blocks, or each block separately."""
    penalty: Rate = 1e-4
    """Weight of the sum of all |coefficients| in the training loss."""
    every: StepOrFraction = 0.01
    """Number of steps between two computed masks, at least one."""
    queue: Positive = 5
    """Number of compared masks: the newest mask and the masks before it."""
    distance: Probability = 0.1
    """Maximum fraction of elements that may differ between the newest mask and each earlier mask."""
    latest: StepOrFraction = 0.15
    """Latest step at which the ticket is selected."""
    criterion: Draw = "coefficients"
    seed: int = 0
    """Seed of random tickets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.kinds:
            raise UsageError(f"{self.name} removes neither heads nor neurons", fix=f"--without {self.name}")

    @property
    def spacing(self) -> int:
        return max(1, int(self.every))

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of units that are removed."""
        return [kind for kind in KINDS if getattr(self, kind)]

    def units(self, model: nn.Module) -> dict[str, PrunableUnits]:
        """Return the units that may be removed, by name of the output layer. Raise RefusedError for a model of an
        unsupported structure; if one kind of units is supported, the fix selects it."""
        try:
            return find_units(model, self.kinds)
        except RefusedError as refused:
            for kind, other in zip(KINDS, reversed(KINDS), strict=True):
                if len(self.kinds) > 1 and _has_units(model, kind):
                    fix = f"--set techniques.{self.name}.{other}=0, which removes {kind} only; or {refused.fix}"
                    raise RefusedError(refused.what, fix=fix) from None
            raise

    def model(self, model: nn.Module) -> nn.Module:
        units, kept = self.units(model), KEPT_PIECES.get(model)
        if kept is None:
            for pieces in units.values():
                add_coefficients(pieces)
                KIND_OF_PIECES.set(pieces.writer, pieces.kind)
                recent_masks = torch.zeros(
                    self.queue, pieces.count, dtype=torch.bool, device=pieces.writer.weight.device
                )
                pieces.writer.register_buffer("recent_masks", recent_masks)
            for kind in self.kinds:
                add_note(f"{sum(each.count for each in units.values() if each.kind == kind)} {kind} have a coefficient")
            return model
        prune_model(model, kept, self.kinds)
        for kind in self.kinds:
            count = sum(each.count for each in find_units(model, {kind}).values())
            add_note(f"{count} {kind} remain")
        return model

    def backward(self, backward: Backward) -> Backward:
        return EarlyBirdBackward(backward, self)

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(AddSignPenalty(self.penalty), transform)

    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the masks of the current coefficients, by name of the output layer."""
        scores: dict[str, dict[str, Tensor]] = {"heads": {}, "neurons": {}}
        for name, coefficients in coefficients_of(model).items():
            scores[KIND_OF_PIECES.of(model.get_submodule(name))][name] = full_value(coefficients).abs()
        mask_neurons = kept_of_all if self.spread == "global" else kept_of_each
        return kept_of_each(scores["heads"], self.heads) | mask_neurons(scores["neurons"], self.neurons)

    @torch.no_grad()
    def remember(self, model: nn.Module) -> None:
        for name, mask in self.masks(model).items():
            recent = model.get_submodule(name).recent_masks
            recent.copy_(torch.cat((mask[None].to(recent.device), recent[:-1])))

    def distances(self, model: nn.Module, known: int) -> dict[str, float]:
        """Return the largest distance between the newest mask and the `known` - 1 masks before it, by kind (heads,
        neurons)."""
        writers = [model.get_submodule(name) for name in coefficients_of(model)]
        kinds = {kind: [w.recent_masks[:known] for w in writers if KIND_OF_PIECES.of(w) == kind] for kind in KINDS}
        return {kind: mask_distance(torch.cat(masks, 1)) for kind, masks in kinds.items() if masks}

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decision, reason = state.logged_decision(self.name, step), ""
        if decision is None and step == 0:
            decision, reason = {"phase": SEARCH}, "search for a ticket"
        elif decision is None:
            if state.model is None or not coefficients_of(state.model):
                return None
            reason = self._why_now(step, state, state.model)
            if not reason:
                return None
            decision = {"phase": TRAIN, "kept": self._draw_ticket(state.model)}
        if decision["phase"] == SEARCH:
            return StructuralChange(reason, decision)
        kept = decision["kept"]

        def mark(model: nn.Module) -> nn.Module:
            KEPT_PIECES.set(model, kept)
            return model

        return StructuralChange(reason, decision, mark, origin=lambda parameter: None, moments="reset")

    def _why_now(self, step: int, state: TrainState, model: nn.Module) -> str:
        known = (int(state.techniques[self.name]["calls"]) - 1) // self.spacing
        if self.criterion != "late" and known >= self.queue:
            distances = self.distances(model, self.queue)
            if max(distances.values()) < self.distance:
                return "the masks agree: " + ", ".join(f"{kind} {each:.3f}" for kind, each in distances.items())
        return "the latest step to draw a ticket" if step >= self.latest else ""

    def _draw_ticket(self, model: nn.Module) -> dict[str, Any]:
        """Select the ticket. Return, by name of the output layer, indices of kept heads or a hexadecimal mask of
        neurons."""
        masks = self.masks(model)
        if self.criterion == "random":
            for name, mask in masks.items():
                scores = torch.rand(len(mask), generator=keyed_generator(f"{self.seed}/{name}"))
                masks[name] = largest(scores, int(mask.sum()))
        of_heads = {name for name in masks if KIND_OF_PIECES.of(model.get_submodule(name)) == "heads"}
        return {
            name: mask.nonzero().flatten().tolist() if name in of_heads else as_hex(mask)
            for name, mask in masks.items()
        }

    def finish(self, model: nn.Module) -> nn.Module:
        """Fold remaining coefficients into the weights."""
        for name in coefficients_of(model):
            writer = model.get_submodule(name)
            KIND_OF_PIECES.remove(writer)
            del writer.recent_masks
        fold_coefficients(model)
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        phases = [entry.decision for entry in state.log if entry.technique == self.name]
        if not phases:
            raise IntegrityError(f"{self.name}: the run's log has no entry about a ticket")
        units, coefficients = find_units(state.model, self.kinds), coefficients_of(state.model)
        if phases[-1]["phase"] == SEARCH:
            if coefficients.keys() != units.keys():
                raise IntegrityError(
                    f"{self.name}: {len(coefficients)} of {len(units)} layers have coefficients; all layers must"
                )
            return
        for name, pieces in units.items():
            kept = phases[-1]["kept"][name]
            count = len(kept) if pieces.kind == "heads" else int(kept, 16).bit_count()
            if pieces.count != count or name in coefficients:
                raise IntegrityError(
                    f"{self.name}: {name} has {pieces.count} {pieces.kind}, but the ticket has {count}"
                )
