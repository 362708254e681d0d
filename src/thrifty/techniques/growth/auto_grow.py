"""AutoProg (Li et al. 2022): grow a model in stages, to sizes chosen by short trials.

Paper       Li et al. 2022, Automated Progressive Learning for Efficient Training of Vision Transformers (CVPR, arXiv
            2203.14509), sections 3.2 to 3.4.
Promise     Early stages are cheaper, without a manual schedule. At stage boundaries before the last, short trials
            select the depth and the size of examples (text length or image side) with the lowest loss · time^w.
Use         run = thrifty.train(recipe="vit-digits", techniques=["growth.auto_grow"], budget="2000 steps")
Start with  `auto_grow:stages=4,search=0.02`; `weight` sets w, which is fitted to the trials by default. Raise `search`,
            the length of the trials, if the selected sizes look random.
Cost        An EMA copy of the parameters, which initializes added blocks. Search steps also train the model and count
            in the budget.
Avoid       Techniques that change width. Searches of few steps, because their losses are mostly noise.
Does not    Measure time by default, because FLOPs counted from shapes make a run reproducible.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction, Positive, Probability, Rate, SettingBound
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import Moments, StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.image_resizing import resize, scaled_side
from thrifty.modeling.image_sizes import images_of, replace_images
from thrifty.modeling.module_surgery import find_stacks
from thrifty.modeling.patch_grid import accept_other_sizes
from thrifty.modeling.text_lengths import has_only_text, truncate_texts
from thrifty.optim.weight_average import EmaTransform
from thrifty.techniques.growth._block_gates import add_gates, gates
from thrifty.techniques.growth._depth_growth import DepthMapping, cut_stacks
from thrifty.techniques.growth._flops_by_size import positions_of, step_flops
from thrifty.techniques.growth._size_choice import best_size, fitted_weight, sizes_up

AVERAGE = "weights_behind"
"""Name of the optimizer slots of the EMA."""
Size = tuple[float, float]
"""Depth and text length (or image side), each as a fraction of the full value."""


def shorten_examples(batch: Batch, fraction: float, multiple: int) -> Batch:
    """Truncate texts, or resize images, to a fraction of their length or sides, in multiples of `multiple`.

    Other examples, and images with patch indices, are unchanged.
    """
    images = images_of(batch)
    if images is not None and "visible" not in batch.fields:  # patch indices are valid for one image size
        return replace_images(
            batch, resize(images, *(scaled_side(side, fraction, multiple) for side in images.shape[-2:]))
        )
    if not has_only_text(batch):
        return batch
    return truncate_texts(batch, scaled_side(batch["tokens"].shape[1] - 1, fraction, multiple))


@dataclass(frozen=True)
class GrownStructure:
    """Last growth decision of a model."""

    since: int
    """First step after the decision."""
    sizes: tuple[Size, ...]
    """Sizes that the steps of a search train in turn; a single size outside a search."""
    full: Mapping[str, int]
    """Number of blocks of each stack at full depth."""

    def size_at(self, step: int) -> tuple[int, Size]:
        index = (step - self.since) % len(self.sizes)
        return index, self.sizes[index]


GROWN: ModuleNote[GrownStructure] = ModuleNote("auto_grow")


def blocks_at(fraction: float, full: int) -> int:
    return max(round(fraction * full), 1)


class GrowthSearchBackward:
    """A backward pass with the sizes of the current growth decision.

    `state` counts steps, and has the number of positions of an example. This number is negative if examples cannot be
    shortened. For each size of the last search, `state` also has the number of trials and the sum of losses. If time is
    measured, it has the sum of seconds too.
    """

    def __init__(self, inner: Backward, settings: "AutoGrow"):
        self.inner, self.settings = inner, settings
        # readable while only shapes are traced, unlike torch.zeros
        self.state = {"steps": torch.tensor(0), "positions": torch.tensor(0)}
        tried = settings.depths * settings.lengths
        # seconds differ between runs, so they are stored only if time is measured
        self.recorded = ("count", "loss", *(["seconds"] if settings.time_source == "measured" else []))
        self.state |= {name: torch.tensor([0.0] * tried).double() for name in self.recorded}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        step = int(self.state["steps"])
        self.state["steps"].add_(1)
        structure = GROWN.get(model)
        if structure is None:
            return self.inner(model, objective, batch)
        index, (depth, length) = structure.size_at(step)
        searching = len(structure.sizes) > 1
        if step == structure.since:
            positions = positions_of(model, batch)
            shorter = positions_of(model, shorten_examples(batch, self.settings.start, self.settings.multiple))
            self.state["positions"].fill_(positions if shorter < positions else -max(positions, 1))
            if searching:
                for name in self.recorded:
                    self.state[name].zero_()
        began = time.perf_counter()

        def is_open(stack: str, block: int, _: int) -> bool:
            full = structure.full.get(stack)  # None for a stack that another technique added; all its blocks run
            return full is None or block < blocks_at(depth, full)

        with gates(model, self.settings.name, is_open):
            outcome = self.inner(model, objective, shorten_examples(batch, length, self.settings.multiple))
        weight = 1.0 if outcome.parts is None else outcome.parts * batch.weight[0]  # not yet divided by the parts
        if searching and 0 < (loss := float(outcome.loss / weight)) < math.inf:
            values = {"count": 1.0, "loss": loss, "seconds": time.perf_counter() - began}
            for name in self.recorded:
                self.state[name][index] += values[name]
        return outcome


class AutoGrow(Technique):
    """The steps before `until` are divided into equal stages. At a stage boundary the model grows to at most twice its
    depth. It then searches a size for `search` steps. Each step of a search trains the first blocks of the model alone,
    on shorter texts or smaller images. Added blocks start from an EMA of the weights (MoGrow). The last stage has the
    full size.

    Decisions are logged with their losses and times, and replayed on resume. With `weight=0`, w is fitted to the tried
    sizes: -d log loss / d log time. Length varies only for plain texts and images; other examples, and those that
    `multiple` does not let become shorter, grow in depth alone. Tokens are counted at full length.

    Differs from the paper: the paper searches for two epochs, with four averages of decays from 0.998 to 0.9996. Here
    one average is used.
    """

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.DEPTH, Claim.SEQUENCE_LENGTH, Claim.RESOLUTION})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it copies weights that adapters keep frozen",
        Claim.TRAINED_START: "a run starts with the smallest model",
        Claim.WEIGHT_MASKS: "the EMA that initializes added blocks is not masked",
        Claim.RANK_WIDE_PLAN: "the memory plan of a block is fixed, and a search skips blocks",
        Claim.PIPELINE_PARALLELISM: "no stage of a pipeline has all blocks, and FLOPs are counted from all blocks",
    }

    stages: Annotated[int, SettingBound(least=2)] = 4
    """Number of stages of equal length."""
    until: StepOrFraction = 1.0
    """End of the last stage."""
    search: StepOrFraction = 0.02
    """Number of steps of each search. With 0, each stage uses the largest size without a search."""
    start: Fraction = 0.5
    """Depth and length of the first stage, as a fraction of the full depth and length."""
    depths: Positive = 3
    """Number of depths that a search tries."""
    lengths: Positive = 2
    """Number of lengths that a search tries for each depth."""
    multiple: Positive = 8
    """Common divisor of shortened text lengths in tokens, or of reduced image sides in pixels."""
    weight: Rate = 0.0
    """Exponent w of time in loss · time^w; 0 fits w to the tried sizes."""
    time_source: Literal["counted", "measured"] = "counted"
    """Time of a step at each size: FLOPs counted from shapes, or measured seconds."""
    momentum: Probability = 0.998
    """Decay of the weight EMA that initializes added blocks."""
    moments: Moments = "copy"
    """Optimizer state after a growth, as in growth.stacking."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stage = self.until // self.stages if isinstance(self.until, int) else self.until / self.stages
        # a search that ends at the start of the next stage would select nothing
        if type(self.search) is type(self.until) and self.search and self.search >= stage:
            half = stage // 2 if isinstance(stage, int) else stage / 2
            raise UsageError(
                f"{self.name}: search '{self.search:g}' is not shorter than a stage of {stage:g}",
                fix=f"--set techniques.{self.name}.search={half:g}; or fewer stages",
            )

    def model(self, model: nn.Module) -> nn.Module:
        add_gates(model, self.name)
        structure = GROWN.get(model)
        if structure is not None and set(structure.full.values()) == {1}:
            add_note("each stack has one block, so only the size of examples grows")
        accept_other_sizes(model, self.name)
        return model

    def backward(self, backward: Backward) -> Backward:
        return GrowthSearchBackward(backward, self)

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(EmaTransform(self.momentum, evaluate=False, name=AVERAGE), transform)

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided = state.logged_decision(self.name, step) or self._decide(step, state)
        if decided is None:
            return None
        mapping, sizes = DepthMapping(state), tuple((depth, length) for depth, length in decided["sizes"])
        return StructuralChange(
            str(decided["why"]),
            decided,
            restructure=lambda model: _cut(model, GrownStructure(step, sizes, _depths(model))),
            origin=mapping.origin,
            added=mapping.adds,
            average=f"{AVERAGE}.mean",
            moments=self.moments,
        )

    def _decide(self, step: int, state: TrainState) -> dict[str, Any] | None:
        """Return the growth decision that is made before step `step`, as JSON values; None if there is none."""
        boundaries = [int(self.until) * stage // self.stages for stage in range(1, self.stages)]
        if step == 0:
            start = self.start if boundaries[-1] else 1.0  # fewer steps than stages
            return {"why": "start small", "sizes": [[start, start]]}
        now = next(entry.decision for entry in reversed(state.log) if entry.technique == self.name)
        (depth, length), searching = now["sizes"][0], len(now["sizes"]) > 1
        if step == boundaries[-1]:
            return {"why": "grow to the full size", "sizes": [[1.0, 1.0]]} if (depth, length) != (1.0, 1.0) else None
        if step in boundaries and (depth, length) != (1.0, 1.0):
            is_fixed = int(state.techniques[self.name]["positions"]) < 0
            lengths = [1.0] if is_fixed else sizes_up(length, self.lengths)
            sizes = [[*size] for size in product(sizes_up(depth, self.depths), lengths)]
            if len(sizes) > 1 and int(self.search) > 0:
                return {"why": "grow, and try sizes", "sizes": sizes}
            return {"why": "grow", "sizes": sizes[:1]}
        if searching and step - int(self.search) in boundaries:
            return {"why": "the best of the sizes tried", **self._choose(now["sizes"], state)}
        return None

    def _choose(self, sizes: Sequence[Sequence[float]], state: TrainState) -> dict[str, Any]:
        # averaged over ranks, so that all ranks select the same size
        trials = {name: mean_over_ranks(state.techniques[self.name][name]).tolist() for name in ("count", "loss")}
        tried = [index for index in range(len(sizes)) if trials["count"][index]]
        if not tried:
            return {"sizes": [list(sizes[0])]}
        losses = [trials["loss"][index] / trials["count"][index] for index in tried]
        times = self._times([sizes[index] for index in tried], tried, state)
        weight = self.weight or fitted_weight(losses, times)
        best = tried[best_size(losses, times, weight)]
        evidence = {
            "tried": [list(sizes[index]) for index in tried],
            "losses": losses,
            "times": times,
            "weight": weight,
        }
        return {"sizes": [list(sizes[best])], **evidence}

    def _times(self, sizes: Sequence[Sequence[float]], tried: Sequence[int], state: TrainState) -> list[float]:
        """Return the cost of one step of each size: FLOPs of one example, or measured seconds."""
        trials, model = state.techniques[self.name], state.model
        assert model is not None
        if self.time_source == "measured":
            return mean_over_ranks(trials["seconds"] / trials["count"].clamp(min=1))[list(tried)].tolist()
        dims = 2 if any(isinstance(module, nn.Conv2d) for module in model.modules()) else 1  # dims that are shortened
        positions, full = abs(int(trials["positions"])), GROWN.of(model).full
        return [
            step_flops(model, {stack: blocks_at(depth, full[stack]) for stack in full}, positions * length**dims)
            for depth, length in sizes
        ]

    def holds(self, state: TrainState) -> None:
        decisions = [entry.decision for entry in state.log if entry.technique == self.name]
        if not decisions:
            raise IntegrityError(f"{self.name}: the run's log has no growth decision")


def _depths(model: nn.Module) -> dict[str, int]:
    return {stack: len(blocks) for stack, blocks in find_stacks(model).items()}


def _cut(model: nn.Module, structure: GrownStructure) -> nn.Module:
    cut_stacks(model, lambda blocks: blocks_at(max(depth for depth, _ in structure.sizes), blocks))
    GROWN.set(model, structure)
    return model
