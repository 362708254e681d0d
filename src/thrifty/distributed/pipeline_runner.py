"""Execution of the stages on one rank: training with micro-batches by torch's schedules, and forward passes alone.

Every rank of a pipeline has the whole batch, so that ranks exchange only hidden states and their gradients. Each stage
runs the objective on a model that is reduced to the modules of the stage (`distributed/pipeline_stages.py`).
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

KeepsActivations = Callable[[StageModel, int], bool]
"""Function of a stage and a micro-batch index. It returns True if the stage keeps the micro-batch's activations."""
Schedules = Callable[[list[PipelineStage]], Any]
"""Function that creates torch's schedule for the stages of a rank."""


class PipelineRunner:
    """Runner of the pipeline stages on this rank, `stages`. `places` are the pipeline ranks of all stages."""

    def __init__(
        self,
        stages: list[StageModel],
        loans: list[SharedParameter],
        places: Sequence[int],
        device: torch.device,
        schedules: Schedules,
        keeps: KeepsActivations,
    ):
        self.stages, self.loans, self.places, self.device = stages, loans, places, device
        self.schedules, self.keeps = schedules, keeps
        self.running: StageModel | None = None
        """The stage that is running, or None."""
        self.keeping = True
        """True if blocks keep their activations in the current pass."""
        self._schedule: tuple[Any, Any] = None, None
        """Shapes of micro-batches, and torch's schedule for these shapes."""
        self._hidden = torch.empty(0, device="meta")
        """A meta tensor with the shape of the hidden states between stages."""
        self._predicting: tuple[Objective, nn.Module]
        self._micro: list[Batch] = []
        self._losses: dict[int, Tensor] = {}
        """Losses of the micro-batches that have passed the last stage."""

    @property
    def has_last(self) -> bool:
        return self.stages[-1].is_last

    def broadcast_last(self, tensor: Tensor | None) -> Tensor:
        """Send the last stage's tensor to all stages, and return it."""
        return broadcast_from_stage(tensor, self.places[-1], self.device)

    @torch.no_grad()
    def predict(self, objective: Objective, model: nn.Module, batch: Batch) -> Prediction:
        """Run a forward pass through all stages. Only the last stage returns a prediction; other stages return an empty
        prediction."""
        self._lend()
        here, prediction, hidden = axis("pipeline").place, Prediction(), None
        for stage in self.stages:
            if not stage.is_first and (previous := self.places[stage.index - 1]) != here:
                hidden = receive(previous, self.device)
            with self._as(stage, hidden) as stage_io:
                prediction = objective.predict(model, batch)
                hidden = stage_io.sent
            if not stage.is_last and (following := self.places[stage.index + 1]) != here:
                assert hidden is not None
                send(hidden, following)
        return prediction if self.has_last else Prediction()

    def train(self, objective: Objective, model: nn.Module, batch: Batch, parts: int) -> Tensor:
        """Run forward and backward passes of a batch in micro-batches. Compute the gradient of the sum of weighted
        losses. Return one loss per example (b,), detached."""
        rows = -(-len(batch) // parts)
        filled = replace(_padded(batch, rows * parts), last=False)
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
        return self.broadcast_last(losses)

    def forward(self, stage: StageModel, part: int, received: Tensor | None) -> Tensor:
        """Run one micro-batch through one stage. Return hidden states; the last stage returns the weighted sum of
        losses.
        """
        (objective, model), batch = self._predicting, self._micro[part]
        self.keeping = self.keeps(stage, part)
        with self._as(stage, received) as stage_io:
            prediction = objective.predict(model, batch)
            if prediction.is_mean or prediction.part_weights is not None:
                raise RefusedError(
                    "the loss is a mean or weights parts of examples, but stages process one micro-batch at a time",
                    fix="return one loss for each example; or --without parallelism.pipeline "
                    "--with parallelism.replicate",
                )
            if stage.is_last:
                losses = objective.losses(prediction, batch)
                self._losses[part] = losses.detach()
                return (losses * batch.weight).sum().float()  # the dtype of the schedule's `output_args`
            return self._expected(stage_io.sent)

    def block(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward pass. If its activations are not kept, the backward pass recomputes them."""
        if self.keeping or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return recompute(inner, args, kwargs, module)

    @contextmanager
    def _as(self, stage: StageModel, received: Tensor | None) -> Iterator[StageIO]:
        self.running = stage
        try:
            with stage.running(received) as stage_io:
                yield stage_io
        finally:
            self.running = None

    def _lend(self) -> None:
        for loan in self.loans:
            loan.lend()

    def _schedule_for(self, objective: Objective, model: nn.Module) -> Any:
        """Return torch's schedule. Recreate the schedule if the shapes of micro-batches have changed."""
        first = self._micro[0]
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in first.fields.items()]
        if self._schedule[0] != shapes:
            hidden = self._hidden = self._hidden_states(objective, model, first)
            loss = torch.empty((), device="meta", requires_grad=True)
            stages = [
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
            self._schedule = shapes, self.schedules(stages)
        return self._schedule[1]

    @torch.no_grad()
    def _hidden_states(self, objective: Objective, model: nn.Module, batch: Batch) -> Tensor:
        """Return a meta tensor with the shape and dtype of the hidden states between stages. The first stage runs one
        example to determine shape and dtype.
        """
        example, stage = None, self.stages[0]
        if stage.is_first:
            with GeneratorStates([self.device]).restored(), self._as(stage, None) as stage_io:
                objective.predict(model, batch.rows(0, 1))
                example = stage_io.sent
        example = broadcast_from_stage(example, self.places[0], self.device)
        return torch.empty((len(batch), *example.shape[1:]), dtype=example.dtype, device="meta", requires_grad=True)

    def _expected(self, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        if hidden.shape != self._hidden.shape or hidden.dtype != self._hidden.dtype:
            raise IntegrityError(
                f"a stage returned {hidden.dtype} {tuple(hidden.shape)}, but the first stage returned "
                f"{self._hidden.dtype} {tuple(self._hidden.shape)}",
                fix="use a model whose hidden states keep shape and dtype from block to block",
            )
        return hidden


class _MicroBatchPass(nn.Module):
    """Adapter of a stage to torch's pipelining: `forward` has the received tensor and a micro-batch index as
    arguments."""

    def __init__(self, runner: PipelineRunner, stage: StageModel):
        super().__init__()
        self.runner, self.stage = runner, stage

    def forward(self, received: Tensor | None = None, *, part: Tensor) -> Tensor:
        return self.runner.forward(self.stage, int(part), received)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self.stage.parameters())


def _padded(batch: Batch, rows: int) -> Batch:
    """Return a batch padded to `rows` rows with copies of its own rows. Copies have weight zero."""
    missing = rows - len(batch)
    if not missing:
        return batch
    padded = batch.take(torch.arange(rows, device=batch.weight.device) % len(batch))
    return padded.weighted(torch.cat([batch.weight, batch.weight.new_zeros(missing)]))


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@cache
def supports_split_backward() -> bool:
    """Return True if schedules with a split backward pass accept custom autograd functions."""
    node: Any = _Doubled.apply(torch.zeros((), requires_grad=True)).grad_fn
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False
