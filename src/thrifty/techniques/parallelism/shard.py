"""ZeRO / FSDP (Rajbhandari et al. 2020): shard optimizer state, gradients and parameters over ranks.

Paper       Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054). The engine is torch's FSDP2 (Zhao et al. 2023, arXiv
            2304.11277), with its hybrid sharding.
Promise     Model states are divided over N ranks, and each block is gathered when it is computed. Equal to the
            single-process run within rounding.
Use         torch.distributed.init_process_group()  # in a script that torchrun starts
            model = thrifty.apply(model, "shard", zero=3)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `shard:zero=3`. If the model fits, `zero=1` or `zero=2` sends less than `zero=3`.
Cost        For P parameters, stage 1 gathers P and reduces P elements per step. Per micro-batch, stage 2 reduces P
            elements, and stage 3 reduces P and gathers 2 P.
Avoid       Stages 2 and 3 if a lower stage fits. Gathering in bfloat16 if norms and the residual stream must stay in
            float32.
Does not    Rename parameters, or sum gradients in your own loop; there, FSDP averages gradients over ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import NeedsTrainer, RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis, submesh
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import rank_shard, refuse_no_group
from thrifty.core.run_notes import add_note
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.written_buffers import broadcast_buffers
from thrifty.distributed.after_backward import call_after_backward
from thrifty.modeling.module_surgery import find_stacks

Zero = Literal[1, 2, 3]


def sharded(model: nn.Module, zero: Zero, policy: MixedPrecisionPolicy, averages: bool = False) -> nn.Module:
    """Apply FSDP2 to each block and then to the model, over the ranks of the data axis.

    Gradients are summed over ranks, or averaged if `averages` is True.
    """
    device = next(model.parameters()).device.type
    copies = axis("replicate").size
    mesh = submesh("replicate", "shard", device=device) if copies > 1 else submesh("shard", device=device)
    stacks = find_stacks(model)
    for blocks in stacks.values():
        for block in dict.fromkeys(blocks):
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    # the head runs outside the model's forward pass, so the root stays gathered until the backward pass
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for module in () if averages else parts_of(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    parts = ", ".join(f"{len(blocks)} blocks in {name or 'the model'}" for name, blocks in stacks.items())
    add_note(f"{parts} and the rest, over {' x '.join(map(str, mesh.shape))} ranks")
    return model


def parts_of(model: nn.Module) -> Iterator[FSDPModule]:
    """Return the modules whose parameters FSDP gathers together: each block, and the model for the rest."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


class ShardingObjective(WrappedObjective):
    """Wrapper of an objective that configures the next backward pass of FSDP.

    It switches gradient synchronization and resharding of parameters on or off. Without a backward pass, parameters are
    resharded after the losses.
    """

    model: nn.Module | None = None

    def __init__(self, inner: Objective, zero: Zero):
        super().__init__(inner)
        self.zero = zero

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.model = model
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(batch.last or self.zero > 1)
            model.set_reshard_after_backward(batch.last or self.zero == 3)
        return super().predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._resharded(super().losses(prediction, batch))

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self._resharded(super().scores(prediction, batch))

    def _resharded(self, result: Tensor) -> Tensor:
        if self.model is not None and not torch.is_grad_enabled():
            for part in parts_of(self.model):
                part.reshard()
        return result


class ShardedDataParallel(Technique):
    """Bytes held between two micro-batches on each of N ranks, for Adam and P parameters in float32:

    zero   gathered as stored  in bfloat16        the paper's mixed precision
    1      8 P + 12 P / N      6 P + 12 P / N     4 P + 12 P / N
    2      4 P + 16 P / N      2 P + 16 P / N     2 P + 14 P / N
    3      16 P / N            16 P / N           16 P / N

    The literature has three formulas for stage 2. With parameters gathered as stored, the formula above equals
    DeepSpeed's documentation. With bfloat16, the formula equals the paper's, except that gradients are summed in 4
    bytes instead of 2. DeepSpeed's estimator, 2 P + 18 P / N, counts gradients in both formats. Stage 1 without
    gradient accumulation equals stage 2, because gradients are sent for one micro-batch only.
    """

    stage, numerics, tolerance = Stage.SHARD, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.DATA_PARALLELISM, Claim.PARAMETER_SHARDING})

    zero: Zero = 3
    """Sharded tensors: 1 is the optimizer state, 2 adds gradients, 3 adds parameters."""
    gather_dtype: Literal["parameter", "bfloat16"] = "parameter"
    """Dtype of gathered parameters and of the computation. Gradients are summed in float32, and updates are in
    float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather_dtype == "bfloat16":
            object.__setattr__(self, "numerics", Numerics.DIFFERENT)
            object.__setattr__(self, "claims", self.claims | {Claim.PRECISION})

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"batches", "objective", "backward"})

    @property
    def policy(self) -> MixedPrecisionPolicy:
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return low if self.gather_dtype == "bfloat16" else MixedPrecisionPolicy()

    def change_forward(self, model: nn.Module) -> None:
        refuse_no_group(self.name)
        if self.zero == 1:
            raise NeedsTrainer(
                f"{self.name}: zero=1 reduces gradients after the last micro-batch, which only the trainer knows",
                fix="zero=2, which is the same without accumulation",
            )
        if axis("data").size > 1:
            sharded(model, self.zero, self.policy, averages=True)
            call_after_backward(model, partial(broadcast_buffers, group=axis("data").group))

    def model(self, model: nn.Module) -> nn.Module:
        if isinstance(model, FSDPModule):
            return model
        if not dist.is_initialized():
            raise RefusedError(
                "sharding requires several processes, and there is one",
                fix="torchrun --nproc-per-node 2 -m thrifty train …",
            )
        if axis("data").size == 1:
            return model
        if self.zero > 1 and axis("pipeline").size > 1:
            raise RefusedError(
                f"zero={self.zero} reduces the gradients of each micro-batch, and a pipeline has many micro-batches",
                fix=f"--set techniques.{self.name}.zero=1",
            )
        return sharded(model, self.zero, self.policy)

    def batches(self, source: BatchSource) -> BatchSource:
        return rank_shard(source)

    def objective(self, objective: Objective) -> Objective:
        return ShardingObjective(objective, self.zero)

    def backward(self, backward: Backward) -> Backward:
        data = axis("data")

        def over_ranks(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            loss = outcome.loss.clone()
            dist.all_reduce(loss, group=data.group)
            broadcast_buffers(model, data.group)
            return replace(outcome, loss=loss)

        return over_ranks if data.size > 1 else backward

    def footprint(self, footprint: Footprint) -> Footprint:
        """Return the footprint of a rank, for one micro-batch.

        N is the number of ranks along the axis "shard", R the number along the axis "replicate". G is the number of
        bytes of gradients, W the number of bytes of gathered parameters. O bytes of W are outside the blocks. The
        largest block has B bytes of W, and b bytes of gradients.

            peak, stage 1   W
            peak, stage 2   W during the loss, W + (2 - 1 / N) b in a block
            peak, stage 3   O during the loss, O + 2 B + (2 - 1 / N) b in a block
            traffic         (W + G) (1 - 1 / N) + 2 G / N (1 - 1 / R), with 2 W - O instead of W at stage 3

        Peaks are added to the single-process peak for a rank's examples. At stages 2 and 3, the single-process peak
        includes only 1 / N of the gradients. At stage 3 a block and the next block are gathered at the same time. The
        gradients of the current block, and gradients in transfer, are not sharded. At stage 1 no gradients are sharded,
        as with gradient accumulation.
        """
        data, copies = axis("data").size, axis("replicate").size
        if data == 1:
            return footprint
        shards = data // copies
        bytes_of = 0.5 if self.gather_dtype == "bfloat16" else 1.0
        whole, outside, block = (bytes_of * size for size in (footprint.parameters, footprint.outside, footprint.block))
        sent, peak = whole, footprint.peak + whole
        if self.zero > 1:
            resident, gathered = (outside, 2 * block) if self.zero == 3 else (whole, 0.0)
            # the peak grows at most in proportion to the kept fraction of gradients
            loss, inside = (each + (footprint.peak - each) / shards for each in (footprint.passes, footprint.inside))
            peak = resident + max(loss, inside + gathered + (2 - 1 / shards) * footprint.block)
        if self.zero == 3:
            sent = 2 * whole - outside
        traffic = (sent + footprint.gradients) * (1 - 1 / shards) + 2 * footprint.gradients / shards * (1 - 1 / copies)
        divided = footprint.scale(
            parameters=1 / shards, gradients=1 if self.zero == 1 else 1 / shards, optimizer=1 / shards
        )
        return divided.peaking(peak).add(traffic=traffic)
