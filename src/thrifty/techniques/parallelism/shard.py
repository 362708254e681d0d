"""Shard: parameters, gradients and optimizer state divided over the ranks, gathered block by block when needed.

Paper     Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), stage 3; engine: torch's FSDP2 (Zhao et al. 2023,
          arXiv 2304.11277).
Promise   model states divided by the number of ranks; the single-process run within the order of summation.
Cost      each rank sends 3 · parameters elements a step instead of replicate's 2.
Does not  rename any parameter.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from thrifty.core.backward import Backward, Outcome
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import Refused
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis, submesh
from thrifty.core.objective import Around, Objective, Prediction
from thrifty.core.ranks import own_share
from thrifty.core.stages import Stage
from thrifty.core.surgery import find_blocks, note
from thrifty.core.technique import Numerics, Technique


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 on each block, then on the rest, over all ranks; gradients are summed, not averaged."""
    device = next(model.parameters()).device.type
    copies = axis("replicate").size
    mesh = submesh("replicate", "shard", device=device) if copies > 1 else submesh("shard", device=device)
    name, blocks = find_blocks(model)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # the head is used outside the model's own forward pass, so what the root gathers stays until the backward pass
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    note(f"{len(blocks)} blocks in {name or 'the model'} and the rest, over {mesh.size()} ranks")
    return model


class GivingBack(Around):
    """Another objective that, where no backward pass will do so, frees what was gathered once the losses are known."""

    model: nn.Module | None = None

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.model = model
        return super().predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._given_back(super().losses(prediction, batch))

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._given_back(super().scores(prediction, batch))

    def _given_back(self, result: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and isinstance(self.model, FSDPModule):
            self.model.reshard()
        return result


@dataclass(frozen=True)
class Shard(Technique):
    stage, numerics, tolerance = Stage.SHARD, Numerics.ROUNDING, 1e-4
    claims = frozenset({"distribution of data", "parameters in pieces"})

    def model(self, model: nn.Module) -> nn.Module:
        if not dist.is_initialized():
            raise Refused("there is only one process", fix="start with: torchrun --nproc-per-node 2 -m thrifty train …")
        return sharded(model)

    def batches(self, source: BatchSource) -> BatchSource:
        return own_share(source)

    def objective(self, objective: Objective) -> Objective:
        return GivingBack(objective)

    def backward(self, backward: Backward) -> Backward:
        def over_ranks(model: nn.Module, objective: Objective, batch: Batch) -> Outcome:
            outcome = backward(model, objective, batch)
            loss = outcome.loss.clone()
            dist.all_reduce(loss, group=axis("data").group)
            return Outcome(loss, outcome.notes)

        return over_ranks

    def footprint(self, footprint: Footprint) -> Footprint:
        share = 1 / axis("data").size
        return footprint.scale(
            parameters=share, gradients=share, optimizer=share, activations=share, temporary=share
        ).add(traffic=3 * footprint.parameters * (1 - share))
