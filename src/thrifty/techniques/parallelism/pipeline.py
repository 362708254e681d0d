"""Pipeline parallelism (Huang et al. 2019): split the blocks over ranks and pass micro-batches through them.

Paper       Huang et al. 2019, GPipe (arXiv 1811.06965), section 2. 1F1B: PipeDream 2019. Interleaved 1F1B: Narayanan et
            al. 2021 (arXiv 2104.04473), section 2.2. Zero Bubble: Qi et al. 2023 (arXiv 2401.10241).
Promise     Parameters, gradients and optimizer state are divided over the ranks, with little traffic. Equal to the
            single-process run within rounding.
Use         own = {"mesh.pipeline": 2}
            run = thrifty.train(data="my.txt", techniques=["pipeline"], settings=own, ranks=2, budget="2000 steps")
Start with  `pipeline:micro_batches=4`. More micro-batches shorten the idle time.
Cost        With p equal stages and m micro-batches, ranks are idle for (p - 1) / (m + p - 1) of the time. The slowest
            stage sets the pace.
Avoid       Models that fit on one machine with parallelism.tensor or parallelism.shard, because both keep all ranks
            busy at any batch size.
Does not    Rename parameters, or untie a tied head; the first stage sends the shared weight to the last stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import from_first_rank
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.distributed.model_partition import balanced_partition, partition_model
from thrifty.distributed.pipeline_runner import PipelineRunner, supports_split_backward
from thrifty.distributed.pipeline_stages import StageModel, cut_into_stages
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.modeling.stage_placeholders import present

ONE_STAGE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SEVERAL_STAGES: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def stage_places(schedule: str, ranks: int, chunks: int) -> list[int]:
    """Return the rank of each stage. Ranks repeat cyclically; for zbv they run from the first to the last rank and
    back."""
    if schedule == "zbv":
        return [*range(ranks), *reversed(range(ranks))]
    return [*range(ranks)] * chunks


def most_ends(places: Sequence[int]) -> tuple[int, int]:
    """Return the maximum number of stage ends on a rank, and of stage ends that connect a rank to another rank.

    Each stage has an end for its input and an end for its output. An end receives hidden states, or it sends hidden
    states and receives their gradients.
    """
    ends = [(place, place != other) for pair in pairwise(places) for place, other in (pair, pair[::-1])]
    by_rank = [[is_remote for place, is_remote in ends if place == rank] for rank in set(places)]
    return max(map(len, by_rank)), max(map(sum, by_rank))


def most_alive(schedule: str, ranks: int, parts: int, chunks: int) -> float:
    """Return the maximum number of micro-batches whose activations a rank holds at once.

    Activations of one of a rank's `chunks` stages count as 1 / `chunks` of a micro-batch.
    """
    if schedule == "gpipe":
        return parts
    if schedule in ("1f1b", "zbv"):
        return min(ranks, parts)
    in_round = parts // max(1, parts // ranks)
    ahead = (chunks - 1) * in_round + (2 if schedule == "interleaved" else 1) * (ranks - 1)
    return min(ahead + 1, parts * chunks) / chunks


LINE: ModuleNote[PipelineRunner] = ModuleNote("pipeline")


class PipelineObjective(WrappedObjective):
    """Wrapper of an objective whose predictions pass through all stages of the pipeline.

    The last stage computes losses and scores, and broadcasts them to all ranks. While a single stage runs, calls pass
    to the inner objective.
    """

    line: PipelineRunner | None = None

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.line = LINE.of(model)
        if self.line.running:
            return self.inner.predict(model, batch)
        if torch.is_grad_enabled():
            raise UsageError(
                "a pipeline computes gradients only in its schedule",
                fix="with torch.no_grad(): objective.predict(model, batch)",
            )
        return self.line.predict(self.inner, model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._broadcast(self.inner.losses, prediction, batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._broadcast(self.inner.scores, prediction, batch)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._broadcast(self.inner.normalizers, prediction, batch)

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        def measure(name: str) -> Any:
            return lambda prediction, batch: self.inner.measures(prediction, batch)[name]

        return {name: self._broadcast(measure(name), prediction, batch) for name in self.measured + self.collected}

    def image_previews(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {}  # only the last stage has images

    def _broadcast(self, compute: Any, prediction: Prediction, batch: Batch) -> Tensor:
        assert self.line is not None
        if self.line.running:
            return compute(prediction, batch)
        return self.line.broadcast_last(compute(prediction, batch) if self.line.has_last else None)


class ScheduledLossObjective(WrappedObjective):
    """Wrapper of an objective whose `losses` run the pipeline schedule, including the backward passes.

    Losses have the per-example weights. The returned losses are leaves of the autograd graph, so that the caller's
    backward pass ends there.
    """

    def __init__(self, inner: Objective, parts: int):
        super().__init__(inner)
        self.parts = parts
        self.model: nn.Module | None = None

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if not torch.is_grad_enabled():
            return super().predict(model, batch)
        self.model = model
        return Prediction()

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        if not torch.is_grad_enabled():
            return super().losses(prediction, batch)
        assert self.model is not None
        return LINE.of(self.model).train(self.inner, self.model, batch, self.parts).requires_grad_()


class PipelineParallel(Technique):
    """Schedules for p stages and m micro-batches (engine: torch.distributed.pipelining):

    gpipe        all forward passes, then all backward passes; memory holds activations of m micro-batches
    1f1b         the same idle time, activations of at most p micro-batches; forward and backward passes alternate
    interleaved  1f1b with `chunks` stages per rank: idle time divided by `chunks`, more traffic
    zero_bubble  interleaved, and weight gradients are computed while a rank would be idle (ZB-1P)
    zbv          two stages per rank in the form of a V: the first rank also has the last stage with the head

    With one micro-batch (`micro_batches = 1`), gpipe is the "vertical" or layer-wise model parallelism of the
    literature: one rank works at a time. Micro-batches are padded to equal size by examples of weight zero. Blocks are
    divided among stages by cost. The value of a tied head is sent to the last stage before each pass. The head's
    gradient is returned after the pass.

    Differs from GPipe: torch runs the backward passes in the order of the forward passes. With `recompute`, activations
    of the first micro-batch are kept, because its backward pass comes first. The paper keeps the last micro-batch. If
    the last stage alternates forward and backward passes, it keeps the activations of all micro-batches.
    `memory.recompute` instead recomputes all activations. Schedules with split backward passes compute chunked losses
    and recomputed values twice.

    The footprint is for a rank with the most blocks and with both embedding and head, as with zbv or a tied head. The
    peak is on the first rank, which holds the activations of the most micro-batches, or on the last rank, which
    computes the loss. From the second backward pass on, gradients are accumulated. torch holds a buffer for the hidden
    states of each micro-batch in either direction. With zbv, torch also keeps hidden states that pass between stages of
    one rank. The footprint does not include these hidden states.
    """

    stage, numerics, tolerance = Stage.CUT, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.PIPELINE_PARALLELISM})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.SHARED_PARAMETERS: "blocks that share their parameters would be on different ranks",
        Claim.SELECTED_EXAMPLES: "each stage would select different examples",
        Claim.RANK_WIDE_PLAN: "each stage plans different blocks",
    }

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    micro_batches: Positive = 4
    """Number of micro-batches per step."""
    chunks: Positive = 2
    """Number of stages per rank, for interleaved and zero_bubble."""
    recompute: bool = False
    """True to keep only the blocks' inputs, except for the micro-batch whose backward pass comes first."""
    blocks: tuple[int, ...] = ()
    """Number of blocks per stage, in order; by default blocks are divided by cost."""
    cost_source: Literal["counted", "measured"] = "counted"
    """Source of the blocks' costs: FLOPs, or seconds of a forward pass on the first rank. With FLOPs, a resumed run has
    the same stages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recompute:
            object.__setattr__(self, "claims", self.claims | {Claim.RECOMPUTATION})
        if self.schedule in ("zero_bubble", "zbv"):
            halves = f"{self.schedule} splits backward passes into halves, which"
            refused = {
                Claim.COMPILED_BLOCKS: f"{halves} a compiler fuses",
                Claim.DROPPED_BLOCKS: f"{halves} a stage without remaining blocks does not have",
                Claim.PARAMETER_SHARDING: f"{halves} bypass the reduction of gradients",
            }
            object.__setattr__(self, "clashes", {**self.clashes, **refused})

    def model(self, model: nn.Module) -> nn.Module:
        ranks = axis("pipeline").size
        if ranks == 1:
            return model
        self._check(ranks)
        parts = partition_model(model, timed=self.cost_source == "measured")
        places = stage_places(self.schedule, ranks, self._chunks)
        counts = self._counts(model, parts.costs, len(places))
        device = next(model.parameters()).device
        stages, loans = cut_into_stages(model, parts, counts, places)
        line = PipelineRunner(stages, loans, places, device, self._schedule, self._keeps)
        if self.recompute:
            for block in present(model.get_submodule(parts.stack).children()):
                wrap_forward(block, line.block)
        LINE.set(model, line)
        add_note(
            f"{', '.join(map(str, counts))} blocks in {len(counts)} stages; this rank has stage "
            f"{' and '.join(str(stage.index) for stage in stages)}"
        )
        return model

    def objective(self, objective: Objective) -> Objective:
        if axis("pipeline").size == 1:
            return objective
        if objective.joint:
            raise RefusedError(
                "a loss that compares all examples of a batch cannot be computed on micro-batches",
                fix="--with parallelism.shard in its place; or --with parallelism.tensor in its place",
            )
        return PipelineObjective(objective)

    def backward(self, backward: Backward) -> Backward:
        if axis("pipeline").size == 1:
            return backward

        def in_stages(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            return backward(model, ScheduledLossObjective(objective, self.micro_batches), batch)

        return in_stages

    def footprint(self, footprint: Footprint) -> Footprint:
        ranks = axis("pipeline").size
        if ranks == 1 or not footprint.parameters:
            return footprint
        depth = round((footprint.parameters - footprint.outside) / footprint.block) if footprint.block else ranks
        blocks = max(self._per_rank(ranks)) if self.blocks else -(-depth // ranks)
        share = blocks / depth
        fraction = (footprint.outside + share * (footprint.parameters - footprint.outside)) / footprint.parameters
        alive = 1 if self.recompute else most_alive(self.schedule, ranks, self.micro_batches, self._chunks)
        at_end = 1 if self.schedule == "1f1b" else alive  # on the last rank, where the loss is
        saved, ends = share * footprint.saved, footprint.activations - footprint.saved
        inside = alive * saved + max(footprint.inside - footprint.saved, 0.0)
        loss = at_end * saved + (at_end - 1) * ends + footprint.passes - footprint.saved
        gradients = fraction * footprint.gradients
        # with all micro-batches alive, gradients are allocated while activations of one are freed
        if alive >= self.micro_batches:
            gradients = max(gradients - saved, 0.0)
        activations = max(alive * saved, at_end * (saved + ends))
        divided = replace(footprint, activations=activations, passes=max(loss, inside), inside=inside).scale(
            parameters=fraction, gradients=fraction, optimizer=fraction, traffic=self.micro_batches
        )
        hidden = self.micro_batches * footprint.hidden
        buffered, sent = most_ends(stage_places(self.schedule, ranks, self._chunks))
        return divided.peaking(max(loss, inside) + gradients).add(buffers=buffered * hidden, traffic=sent * hidden)

    def _per_rank(self, ranks: int) -> list[int]:
        places = stage_places(self.schedule, ranks, self._chunks)
        pairs = list(zip(self.blocks, places, strict=True))
        return [sum(count for count, at in pairs if at == place) for place in range(ranks)]

    @property
    def _chunks(self) -> int:
        return 1 if self.schedule in ONE_STAGE else 2 if self.schedule == "zbv" else self.chunks

    def _check(self, ranks: int) -> None:
        """Raise RefusedError for settings that torch's pipeline schedules do not support."""
        if self.schedule in ("zero_bubble", "zbv") and not supports_split_backward():
            raise RefusedError(
                f"torch {torch.__version__} cannot split the backward pass of the loss for schedule {self.schedule!r}",
                fix=f"--set techniques.{self.name}.schedule=interleaved; or install a newer torch",
            )
        if self.schedule == "1f1b" and self.micro_batches < ranks:
            raise RefusedError(
                f"1f1b requires at least as many micro-batches as stages: {ranks}, not {self.micro_batches}",
                fix=f"--set techniques.{self.name}.micro_batches={ranks}",
            )
        if self.schedule in ("interleaved", "zero_bubble") and self.micro_batches % max(1, self.micro_batches // ranks):
            raise RefusedError(
                f"{self.micro_batches} micro-batches do not divide into equal rounds over {ranks} ranks",
                fix=f"--set techniques.{self.name}.micro_batches={-(-self.micro_batches // ranks) * ranks}",
            )

    def _counts(self, model: nn.Module, costs: Sequence[float], stages: int) -> list[int]:
        depth = len(costs) - 2
        if not self.blocks:
            counts = balanced_partition(costs, stages)
            if is_fake(next(model.parameters())):
                return counts
            return [int(count) for count in from_first_rank(torch.tensor(counts))]
        if len(self.blocks) != stages or sum(self.blocks) != depth or 0 in self.blocks:
            raise RefusedError(
                f"blocks {list(self.blocks)} do not divide {depth} blocks into {stages} stages",
                fix=f"--set techniques.{self.name}.blocks=[]; or write {stages} positive numbers that sum to {depth}",
            )
        return list(self.blocks)

    def _schedule(self, stages: list[PipelineStage]) -> Any:
        kind = ONE_STAGE.get(self.schedule)
        new_schedule = partial(kind, stages[0]) if kind else partial(SEVERAL_STAGES[self.schedule], stages)
        return new_schedule(self.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def _keeps(self, stage: StageModel, part: int) -> bool:
        return part == 0 or (stage.is_last and self.schedule != "gpipe")
