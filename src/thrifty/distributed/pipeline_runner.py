"""The stages of one rank at work: micro-batches through torch's schedules, and forward passes alone.

Every rank of a pipeline has the whole batch, so that only hidden states travel, and each stage predicts for itself: it
runs the objective on the model as that stage (`distributed/pipeline_stages.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from thrifty.core.batches import Batch
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective, Prediction
from thrifty.core.randomness import GeneratorStates
from thrifty.distributed.pipeline_stages import SharedParameter, StageModel
from thrifty.distributed.stage_communication import broadcast_from_stage, receive, send
from thrifty.memory.recomputation import recompute
from thrifty.modeling.stage_placeholders import StageIO

Kept = Callable[[StageModel, int], bool]
"""Whether a stage keeps the activations of the micro-batch of this number."""
Schedules = Callable[[list[PipelineStage]], Any]
"""torch's schedule for the stages of a rank."""


class PipelineRunner:
    """`places` are those of all stages along the pipeline; of them this rank has `stages`."""

    def __init__(
        self,
        stages: list[StageModel],
        loans: list[SharedParameter],
        places: Sequence[int],
        device: torch.device,
        schedules: Schedules,
        keeps: Kept,
    ):
        self.stages, self.loans, self.places, self.device = stages, loans, places, device
        self.schedules, self.keeps = schedules, keeps
        self.running: StageModel | None = None
        """The stage whose pass this is, while one lasts."""
        self.keeping = True
        """Whether blocks keep their activations in this pass."""
        self._schedule: tuple[Any, Any] = None, None
        """torch's schedule, behind the shapes of micro-batches that it is for."""
        self._hidden = torch.empty(0, device="meta")
        """What goes from stage to stage, without values."""
        self._predicting: tuple[Objective, nn.Module]
        self._micro: list[Batch] = []
        self._losses: dict[int, Tensor] = {}
        """Of the micro-batches that were through the last stage."""

    @property
    def has_last(self) -> bool:
        return self.stages[-1].is_last

    def tell(self, tensor: Tensor | None) -> Tensor:
        """What the last stage found, on all."""
        return broadcast_from_stage(tensor, self.places[-1], self.device)

    @torch.no_grad()
    def predict(self, objective: Objective, model: nn.Module, batch: Batch) -> Prediction:
        """A forward pass through all stages. Only the last one has a prediction to show for it."""
        self._lend()
        here, prediction, hidden = axis("pipeline").place, Prediction(), None
        for stage in self.stages:
            if not stage.is_first and (before := self.places[stage.index - 1]) != here:
                hidden = receive(before, self.device)
            with self._as(stage, hidden) as passage:
                prediction = objective.predict(model, batch)
                hidden = passage.given
            if not stage.is_last and (behind := self.places[stage.index + 1]) != here:
                assert hidden is not None
                send(hidden, behind)
        return prediction if self.has_last else Prediction()

    def train(self, objective: Objective, model: nn.Module, batch: Batch, parts: int) -> Tensor:
        """Forward and backward passes of a batch in micro-batches: gradients of the sum of weighted losses, and one
        loss per example (b,), without a gradient of its own."""
        rows = -(-len(batch) // parts)
        filled = replace(_filled(batch, rows * parts), last=False)
        self._micro = [filled.rows(start, start + rows) for start in range(0, len(filled), rows)]
        self._micro[-1] = replace(self._micro[-1], last=batch.last)
        self._lend()
        schedule = self._schedule_for(objective, model)
        self._predicting = objective, model
        numbers = torch.arange(parts)
        schedule.step(part=numbers, target=numbers, losses=[], return_outputs=False)
        for loan in self.loans:
            loan.give_back()
        losses = torch.cat([self._losses[part] for part in range(parts)])[: len(batch)] if self.has_last else None
        self._micro, self._losses = [], {}
        return self.tell(losses)

    def forward(self, stage: StageModel, part: int, received: Tensor | None) -> Tensor:
        """One micro-batch through one stage: hidden states, or the weighted sum of its losses."""
        (objective, model), batch = self._predicting, self._micro[part]
        self.keeping = self.keeps(stage, part)
        with self._as(stage, received) as passage:
            prediction = objective.predict(model, batch)
            if prediction.is_mean or prediction.part_weights is not None:
                raise RefusedError(
                    "the loss is a mean, or counts by the weights of parts, and stages see one micro-batch at a time",
                    fix="return one loss for each example, or --with parallelism.replicate in the pipeline's place",
                )
            if stage.is_last:
                losses = objective.losses(prediction, batch)
                self._losses[part] = losses.detach()
                return (losses * batch.weight).sum().float()  # as the schedule was told
            return self._expected(passage.given)

    def block(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass, which is run again in the backward pass unless its activations are kept."""
        if self.keeping or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return recompute(inner, args, kwargs, module)

    @contextmanager
    def _as(self, stage: StageModel, received: Tensor | None) -> Iterator[StageIO]:
        self.running = stage
        try:
            with stage.running(received) as passage:
                yield passage
        finally:
            self.running = None

    def _lend(self) -> None:
        for loan in self.loans:
            loan.lend()

    def _schedule_for(self, objective: Objective, model: nn.Module) -> Any:
        """torch's schedule, made again when micro-batches have other shapes."""
        first = self._micro[0]
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in first.fields.items()]
        if self._schedule[0] != shapes:
            hidden = self._hidden = self._hidden_states(objective, model, first)
            loss = torch.empty((), device="meta", requires_grad=True)
            made = [
                PipelineStage(
                    _MicroBatchPass(self, stage),
                    stage.index,
                    len(self.places),
                    self.device,
                    input_args=() if stage.is_first else hidden,
                    output_args=loss if stage.is_last else hidden,
                    group=axis("pipeline").group,
                )
                for stage in self.stages
            ]
            self._schedule = shapes, self.schedules(made)
        return self._schedule[1]

    @torch.no_grad()
    def _hidden_states(self, objective: Objective, model: nn.Module, batch: Batch) -> Tensor:
        """What goes from stage to stage, without values: found by the first stage on one example."""
        one, stage = None, self.stages[0]
        if stage.is_first:
            with GeneratorStates([self.device]).restored(), self._as(stage, None) as passage:
                objective.predict(model, batch.rows(0, 1))
                one = passage.given
        one = broadcast_from_stage(one, self.places[0], self.device)
        return torch.empty((len(batch), *one.shape[1:]), dtype=one.dtype, device="meta", requires_grad=True)

    def _expected(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        if hidden.shape != self._hidden.shape or hidden.dtype != self._hidden.dtype:
            raise IntegrityError(
                f"a stage gives {hidden.dtype} {tuple(hidden.shape)} where {self._hidden.dtype} "
                f"{tuple(self._hidden.shape)} left the first one",
                fix="a pipeline needs hidden states that keep their shape from block to block",
            )
        return hidden


class _MicroBatchPass(nn.Module):
    """A stage as torch's pipeline sees it: called with what it received and the number of a micro-batch."""

    def __init__(self, line: PipelineRunner, stage: StageModel):
        super().__init__()
        self.line, self.stage = line, stage

    def forward(self, received: Tensor | None = None, *, part: Tensor) -> Tensor:
        return self.line.forward(self.stage, int(part), received)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self.stage.parameters())


def _filled(batch: Batch, rows: int) -> Batch:
    """So many rows: those that are missing are the batch's own again, at weight zero."""
    missing = rows - len(batch)
    if not missing:
        return batch
    again = batch.take(torch.arange(rows, device=batch.weight.device) % len(batch))
    return again.weighted(torch.cat([batch.weight, batch.weight.new_zeros(missing)]))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, of_result: Tensor) -> Tensor:
        return 2 * of_result


@cache
def supports_split_backward() -> bool:
    """Whether schedules that compute gradients of weights later go through functions that are not torch's own."""
    node: Any = _Doubled.apply(torch.zeros((), requires_grad=True)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False
