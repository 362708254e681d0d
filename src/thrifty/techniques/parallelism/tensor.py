"""Tensor parallelism (Shoeybi et al. 2019): split each layer's weights over ranks; all ranks process the same batch.

Paper       Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3. Sequence parallelism: Korthikanti et al.
            2022 (arXiv 2205.05198), section 4.2.
Promise     Weights, gradients, optimizer state and most activations are divided by the number of ranks. Equal to the
            single-process run within rounding.
Use         torch.distributed.init_process_group()  # in a script that torchrun starts
            model = thrifty.apply(model, "tensor")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `tensor`. `sequence_parallel=true` also divides norms and residual streams along tokens.
Cost        Per block, four all-reduces of hidden states (batch, tokens, width), two in each pass. They do not overlap
            with computation.
Avoid       Models that fit with parallelism.shard, because sharding sends less. Ranks on several machines.
Does not    Rename parameters, or change their initialization; the whole model is initialized before it is split.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import AXES, axis, set_mesh, submesh
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.ranks import ranks, refuse_no_group
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique
from thrifty.distributed.after_backward import call_after_backward
from thrifty.distributed.tensor_parallel_model import TensorParallelizer, split_model

WHOLE, WHOLE_WITH_SEQUENCE_PARALLEL = 0.27, 0.125
"""Fractions of the activations that are replicated on every rank, measured on gpt and llama blocks. Without sequence
parallelism, inputs of split layers and norms are replicated; with it, only inputs of split layers."""


SPLITTING: ModuleNote[TensorParallelizer] = ModuleNote("splitting")


class VocabularyParallelHead(WrappedObjective):
    """Wrapper of an objective whose output head is an nn.Linear with a weight divided over ranks.

    The loss then uses each rank's part of the vocabulary. Called as a module, the head returns all logits.
    """

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        prediction = super().predict(model, batch)
        head = prediction.head
        if isinstance(head, nn.Linear) and isinstance(head.weight, DTensor):
            bare = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
            bare.weight, bare.bias = head.weight, head.bias
            prediction.head = bare
        return prediction


@torch.no_grad()
def settle_gradients(model: nn.Module, summed: set[str], group: dist.ProcessGroup | None) -> None:
    """All-reduce the partial gradients over ranks.

    Gradients are partial for replicated parameters that each rank used on a different part of the data (`summed`), and
    for DTensors with partial placements.
    """
    partial: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if name in summed:
            partial += local_tensors([parameter.grad])
        elif isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    for dtype in dict.fromkeys(gradient.dtype for gradient in partial):  # the same order on all ranks
        group_gradients = [gradient for gradient in partial if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in group_gradients])
        dist.all_reduce(flat, group=group)
        for gradient, values in zip(
            group_gradients, flat.split([gradient.numel() for gradient in group_gradients]), strict=True
        ):
            gradient.copy_(values.view_as(gradient))


def is_divided(parameter: Tensor) -> bool:
    """Return True if ranks of the tensor axis hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and not place.is_replicate() for name, place in zip(names, parameter.placements, strict=True)
    )


class TensorParallel(Technique):
    """The engine is torch's DTensor. The first matrix of a pair is split by outputs, the second by inputs, and
    attention by heads. Embedding, head and loss are split by the vocabulary, so no rank holds all logits. With
    `sequence_parallel`, each all-reduce becomes a reduce-scatter and an all-gather with the same traffic. In your own
    loop all ranks compute the same examples. Clip with `thrifty.apply(optimizer, "clip")`, which handles divided
    gradients.

    A layer with several slices (queries, keys and values) is stored so that the rows of each rank are contiguous
    (`core/shard_layout.py`). Checkpoints and exports have the original order of rows. Norms, position embeddings and
    biases of row-split layers are replicated on all ranks. Random values are equal on all ranks for replicated
    activations and differ for divided activations.
    """

    stage, numerics, tolerance = Stage.SPLIT, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.TENSOR_PARALLELISM})

    sequence_parallel: bool = False
    """True to divide activations outside the split layers along tokens: norms, residual stream and saved tensors."""
    plan: tuple[str, ...] = ()
    """Entries "pattern=style" for layers of unknown models, or for layers with a split other than the default. A style
    is column, row, summed or whole (`distributed/tensor_parallel_plan.py`)."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective", "backward"})

    def change_forward(self, model: nn.Module) -> None:
        refuse_no_group(self.name)
        if ranks() > 1:
            set_mesh({**dict.fromkeys(AXES, 1), "tensor": ranks()}, next(model.parameters()).device.type)
            group = axis("tensor").group
            call_after_backward(model, lambda module: settle_gradients(module, SPLITTING.of(module).summed, group))

    def model(self, model: nn.Module) -> nn.Module:
        if axis("tensor").size > 1:
            mesh = submesh("tensor", device=next(model.parameters()).device.type)
            SPLITTING.set(model, split_model(model, mesh, self.plan, self.sequence_parallel))
        return model

    def objective(self, objective: Objective) -> Objective:
        return VocabularyParallelHead(objective) if axis("tensor").size > 1 else objective

    def backward(self, backward: Backward) -> Backward:
        tensor = axis("tensor")

        def settled(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            settle_gradients(model, SPLITTING.of(model).summed, tensor.group)
            return outcome

        return settled if tensor.size > 1 else backward

    def footprint(self, footprint: Footprint) -> Footprint:
        """Return the footprint of one of N ranks. Matrices are divided, vectors are replicated.

        Each micro-batch has four all-reduces of hidden states per block and two outside the blocks. In a ring
        all-reduce a rank sends 2 (1 - 1/N) times the bytes.
        """
        ranks = axis("tensor").size
        if ranks == 1 or not footprint.parameters:
            return footprint
        fraction = (footprint.vectors + (footprint.parameters - footprint.vectors) / ranks) / footprint.parameters
        whole = WHOLE_WITH_SEQUENCE_PARALLEL if self.sequence_parallel else WHOLE
        blocks = (footprint.parameters - footprint.outside) / footprint.block if footprint.block else 0
        divided = ("parameters", "outside", "block", "gradients", "optimizer", "temporary")
        partly = dict.fromkeys(("activations", "saved", "passes", "inside"), whole + (1 - whole) / ranks)
        return footprint.scale(**dict.fromkeys(divided, fraction), **partly).add(
            traffic=(4 * blocks + 2) * 2 * (1 - 1 / ranks) * footprint.hidden
        )

    def finish(self, model: nn.Module) -> nn.Module:
        if SPLITTING.get(model) is not None:
            SPLITTING.remove(model).undo.close()
        return model

    @torch.no_grad()
    def holds(self, state: TrainState) -> None:
        tensor = axis("tensor")
        assert state.model is not None
        whole = {name: p for name, p in state.model.named_parameters() if not is_divided(p)}
        if tensor.size == 1 or not whole:
            return
        sums = torch.stack([values.double().sum() for values in local_tensors([*whole.values()])])
        least, most = sums.clone(), sums
        dist.all_reduce(least, dist.ReduceOp.MIN, tensor.group)
        dist.all_reduce(most, dist.ReduceOp.MAX, tensor.group)
        for name, differs in zip(whole, (most - least > 1e-3 * most.abs()).tolist(), strict=True):
            if differs:
                raise IntegrityError(f"{self.name}: {name} differs between ranks of the tensor axis, and must be equal")
