"""Pipeline stages of a model: the modules of one rank, and the execution of each stage.

Between passes, a rank's model holds the parameters of its stages under their own names, and a `StagePlaceholder` for
every other module. While a stage runs, the modules around its blocks are replaced by `StageInput` and `StageOutput`.
Computations before the first block and after the last block still run, and their results are ignored. The model's own
forward pass and the objective's `predict` are therefore unchanged, including masks and positions.

A parameter of several stages, such as an embedding that is tied to the output head, belongs to the first of these
stages. The other stages receive its value before each pass and send its gradient after the pass. The parameter has one
name and one optimizer state, and gradient norms count it once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thrifty.core.errors import RefusedError
from thrifty.core.mesh import DATA, axis
from thrifty.core.shard_layout import local_tensors
from thrifty.distributed.model_partition import ModelPartition
from thrifty.modeling.stage_placeholders import StageInput, StageIO, StageOutput, StagePlaceholder


@dataclass
class StageModel:
    """One pipeline stage on the rank that holds it."""

    index: int
    is_first: bool
    is_last: bool
    modules: list[nn.Module]
    stage_io: StageIO = field(default_factory=StageIO)
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """Replacement modules while the stage runs: parent, name, module."""

    @contextmanager
    def running(self, received: Tensor | None) -> Iterator[StageIO]:
        """Within the context, reduce the model to this stage. `received` holds the previous stage's hidden states."""
        originals = [(parent, name, parent._modules[name]) for parent, name, _ in self.places]
        self.stage_io.received, self.stage_io.sent = received, None
        for parent, name, module in self.places:
            parent._modules[name] = module
        try:
            yield self.stage_io
        finally:
            for parent, name, module in originals:
                parent._modules[name] = module
            self.stage_io.received, self.stage_io.sent = None, None

    def parameters(self) -> list[Tensor]:
        """Return the stage's own parameters and the parameters that the stage borrows from other stages."""
        tensors = {}
        for module in (each for own in self.modules for each in own.modules()):
            for tensor in (*module.parameters(recurse=False), *vars(module).get("borrowed", ())):
                tensors[id(tensor)] = tensor
        return list(tensors.values())


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of the pipeline rank `owner` that the pipeline rank `borrower` uses too."""

    owner: int
    borrower: int
    holder: nn.Module
    """Module with the parameter: the original module on the owner, a module with a copy on the borrower."""
    name: str
    """Name of the parameter in `holder`."""

    def lend(self) -> None:
        """Send the parameter's value from the owner to the borrower."""
        here, (value,) = axis("pipeline"), local_tensors([_whole_over_data(self._tensor.detach())])
        if here.place == self.owner:
            dist.send(value.contiguous(), group=here.group, group_dst=self.borrower)
        else:
            dist.recv(value, group=here.group, group_src=self.owner)

    def give_back(self) -> None:
        """Add the borrower's gradient to the owner's gradient."""
        here, tensor = axis("pipeline"), self._tensor
        if not tensor.requires_grad:
            return
        own_gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if isinstance(tensor, DTensor):
            own_gradient = own_gradient.redistribute(placements=tensor.placements)
        (gradient,) = local_tensors([own_gradient.detach()])
        if here.place == self.borrower:
            dist.send(gradient.contiguous(), group=here.group, group_dst=self.owner)
            tensor.grad = None
        else:
            whole = _whole_over_data(tensor.detach())
            (borrowed_gradient,) = local_tensors([torch.empty_like(whole)])
            dist.recv(borrowed_gradient, group=here.group, group_src=self.borrower)
            gradient.add_(_own_part(borrowed_gradient, whole, tensor))
            tensor.grad = own_gradient

    @property
    def _tensor(self) -> Tensor:
        """Current parameter. Each access looks the parameter up again, because sharding replaces parameters."""
        return getattr(self.holder, self.name)


def _whole_over_data(tensor: Tensor) -> Tensor:
    """Gather a tensor along the data axis if the tensor is sharded along this axis. All other axes are unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = [
        place if name not in DATA else Replicate() for name, place in zip(names, tensor.placements, strict=True)
    ]
    return tensor.redistribute(placements=placements)


def _own_part(gradient: Tensor, whole: Tensor, tensor: Tensor) -> Tensor:
    """Return this rank's shard of the gradient of `tensor`, summed over ranks. `gradient` is the unsharded gradient of
    this rank's examples."""
    if not isinstance(tensor, DTensor) or not isinstance(whole, DTensor):
        return gradient
    if set(DATA) & set(tensor.device_mesh.mesh_dim_names or ()):
        dist.all_reduce(gradient, group=axis("data").group)
    summed = DTensor.from_local(gradient, whole.device_mesh, whole.placements, run_check=False)
    return summed.redistribute(placements=tensor.placements).to_local()


def cut_into_stages(
    model: nn.Module, parts: ModelPartition, counts: Sequence[int], places: Sequence[int]
) -> tuple[list[StageModel], list[SharedParameter]]:
    """Reduce a model to this rank's stages. Return the stages and the shared parameters. Stage i has `counts[i]` blocks
    and is on the pipeline rank `places[i]`."""
    here, blocks = axis("pipeline").place, model.get_submodule(parts.stack)
    stage_of = _stages(model, parts, counts)
    _refuse_idle(stage_of, places)
    holders = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], module)
        for name, module in model.named_modules(remove_duplicate=False)
        if module in stage_of
    ]
    front = {model.get_submodule(name) for name in parts.front}
    stages = []
    for index in (stage for stage, place in enumerate(places) if place == here):
        own = [module for module, stage in stage_of.items() if stage == index]
        stage = StageModel(index, index == 0, index == len(counts) - 1, own)
        first = sum(counts[:index])
        boundaries = {str(first - 1): StageInput, str(first + counts[index]): StageOutput}
        for holder, name, module in holders:
            if stage_of[module] != index:
                kind = boundaries.get(name) if holder is blocks else StageInput if module in front else None
                stage.places.append((holder, name, kind(module, stage.stage_io) if kind else StagePlaceholder(module)))
        stages.append(stage)
    loans = _loans(stage_of, places)
    for holder, name, module in holders:
        if places[stage_of[module]] != here:
            holder._modules[name] = StagePlaceholder(module)
    return stages, loans


def _stages(model: nn.Module, parts: ModelPartition, counts: Sequence[int]) -> dict[nn.Module, int]:
    """Return the stage of each module that belongs to a single stage."""
    stages = {model.get_submodule(name): 0 for name in parts.front}
    blocks = [block for block in model.get_submodule(parts.stack).children()]
    stages |= dict(zip(blocks, (stage for stage, count in enumerate(counts) for _ in range(count)), strict=True))
    return stages | {model.get_submodule(name): len(counts) - 1 for name in parts.back}


def _refuse_idle(stage_of: Mapping[nn.Module, int], places: Sequence[int]) -> None:
    """Raise RefusedError on all ranks if one rank has no parameter to train."""
    owners: dict[nn.Parameter, int] = {}
    for whole, stage in stage_of.items():
        for parameter in whole.parameters():
            if parameter.requires_grad:
                owners.setdefault(parameter, places[stage])
    if idle := set(places) - set(owners.values()):
        raise RefusedError(
            f"rank {min(idle)} of the pipeline has no parameter to train",
            fix="train parameters in all blocks; or --without parallelism.pipeline",
        )


def _loans(stage_of: Mapping[nn.Module, int], places: Sequence[int]) -> list[SharedParameter]:
    """Return the parameters that ranks share, and put copies in place of the parameters that this rank borrows."""
    here = axis("pipeline").place
    users: dict[nn.Parameter, list[tuple[int, nn.Module, str]]] = {}
    for whole, stage in stage_of.items():
        for module in whole.modules():
            for name, parameter in module.named_parameters(recurse=False):
                users.setdefault(parameter, []).append((places[stage], module, name))
    loans = []
    for parameter, uses in users.items():
        owner, holder, its_name = uses[0]  # modules come in the order of their stages
        for borrower in sorted({place for place, _, _ in uses} - {owner}):
            if here == owner:
                loans.append(SharedParameter(owner, borrower, holder, its_name))
            elif here == borrower:
                stand_in = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                own = [(module, name) for place, module, name in uses if place == here]
                for module, name in own:
                    del module._parameters[name]  # used in the computation, but not listed among the parameters
                    vars(module)[name] = stand_in
                    vars(module).setdefault("borrowed", []).append(stand_in)
                loans.append(SharedParameter(owner, borrower, *own[0]))
    return loans
