"""GPipe over two ranks, written as a technique and nothing else.

Paper     Huang et al. 2019, GPipe (arXiv 1811.06965): micro-batches go forward through all stages, then back.
The model seam keeps one stage's blocks on each rank, without renaming a parameter; the objective seam lets a
prediction travel through the stages; the backward seam runs the schedule.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrifty.core.backward import Backward, Outcome
from thrifty.core.batches import Batch
from thrifty.core.compose import compose
from thrifty.core.objective import Objective, Prediction
from thrifty.core.stages import Stage
from thrifty.core.surgery import find_blocks
from thrifty.core.technique import Numerics, Technique
from thrifty.training.evaluate import held_out_loss
from thrifty.training.loop import Record, train
from tiny_runs import plain_run, technique

STEPS, WIDTH, STAGES = 6, 32, 2
CPU = torch.device("cpu")


class Received(nn.Module):
    """In place of the embedding of a later stage: what the stage before it sent."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.empty(*tokens.shape, WIDTH)
        dist.recv(hidden, dist.get_rank() - 1)
        self.hidden = hidden.requires_grad_(torch.is_grad_enabled())
        return self.hidden


def keep_stage(model: nn.Module) -> nn.Module:
    """Only this rank's blocks; the first stage keeps the embedding, the last one the norm and the head."""
    rank, (_, blocks) = dist.get_rank(), find_blocks(model)
    share = len(blocks) // STAGES
    for index in range(len(blocks)):
        if index // share != rank:
            blocks[index] = nn.Identity()  # so that the names of the others stay
    if rank > 0:
        model.embedding = Received()
    if rank < STAGES - 1:
        model.norm, model.head = nn.Identity(), None
    return model


class Through(Objective):
    """A prediction passes through all stages; the losses, known to the last one, are told to all when asked alone."""

    def __init__(self, inner: Objective):
        self.inner = inner

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if dist.get_rank() == STAGES - 1:
            return self.inner.predict(model, batch)
        hidden = model(batch["tokens"][:, :-1])
        dist.send(hidden.detach(), dist.get_rank() + 1)
        return Prediction(hidden=hidden)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        last = dist.get_rank() == STAGES - 1
        losses = self.inner.losses(prediction, batch) if last else torch.zeros(len(batch))
        if not torch.is_grad_enabled():
            dist.broadcast(losses, STAGES - 1)
        return losses

    def tokens(self, batch: Batch) -> int:
        return self.inner.tokens(batch) // STAGES  # the loop adds up over ranks


def gpipe(parts: int) -> Backward:
    def in_stages(model: nn.Module, objective: Objective, batch: Batch) -> Outcome:
        rank, last = dist.get_rank(), STAGES - 1
        rows = -(-len(batch) // parts)
        micro = [batch.rows(start, start + rows) for start in range(0, len(batch), rows)]
        forward: list[tuple[Tensor, Tensor | None]] = []  # what each micro-batch ends in here, and what it began with
        for part in micro:
            prediction = objective.predict(model, part)
            if rank == last:
                end = (objective.losses(prediction, part) * part.weight).sum()
            else:
                assert prediction.hidden is not None
                end = prediction.hidden
            forward.append((end, model.embedding.hidden if rank else None))
        loss = torch.zeros(())
        for end, begin in forward:
            gradient = None
            if rank < last:
                gradient = torch.empty_like(end)
                dist.recv(gradient, rank + 1)
            else:
                loss += end.detach()
            end.backward(gradient)
            if begin is not None:
                dist.send(begin.grad, rank - 1)
        dist.broadcast(loss, last)
        return Outcome(loss)

    return in_stages


@dataclass(frozen=True)
class Pipeline(Technique):
    stage, numerics = Stage.SPLIT, Numerics.ROUNDING

    parts: int = 4
    """Micro-batches."""

    def model(self, model: nn.Module) -> nn.Module:
        return keep_stage(model)

    def objective(self, objective: Objective) -> Objective:
        return Through(objective)

    def backward(self, backward: Backward) -> Backward:
        return gpipe(self.parts)


def trained(techniques: Sequence[Technique]) -> tuple[list[Record], dict[str, Tensor], float]:
    """The records, this rank's parameters and the loss on other data of a short run."""
    run = compose(plain_run(batch=8, tied=False), [*techniques, technique("optimizers.adamw")], STEPS)
    state = run.start()
    with closing(train(run, state, seed=0)) as records:
        made = list(records)
    assert state.model is not None
    unseen = [run.plain.source.at(STEPS)]
    loss = held_out_loss(state.model, run.objective, unseen, CPU)
    return made, {name: value.detach() for name, value in state.model.named_parameters()}, loss


def on_one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", STAGES), rank=rank, world_size=STAGES)
    try:
        records, parameters, loss = trained([Pipeline()])
        found = {"losses": torch.tensor([record.loss for record in records]), "held_out": torch.tensor(loss)}
        found |= {"tokens": torch.tensor([record.tokens for record in records])}
        torch.save((found, parameters), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
