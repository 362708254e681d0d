"""A model cut into stages: what one rank keeps, and how each of its stages is run.

At rest a rank's model holds the parameters of its stages under their own names, and `StagePlaceholder` for all other
modules.
To run one stage, what is around its blocks stands aside for as long as the pass lasts: whatever feeds the first block
and follows the last is computed on, and ignored. So the model's own forward pass and the objective's `predict` run
unchanged, masks and positions included.

A parameter that stages share, such as a head tied to the embedding, belongs to the first of them. Others borrow its
value before each pass and give back its gradient after: it has one name, one optimizer state and one place in norms.
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
    """One stage, on the rank that has it."""

    index: int
    is_first: bool
    is_last: bool
    modules: list[nn.Module]
    """Its own."""
    passage: StageIO = field(default_factory=StageIO)
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """What stands where while it runs: holder, name and module."""

    @contextmanager
    def running(self, received: Tensor | None) -> Iterator[StageIO]:
        """The model as this stage, with what the stage before sent."""
        aside = [(holder, name, holder._modules[name]) for holder, name, _ in self.places]
        self.passage.received, self.passage.given = received, None
        for holder, name, module in self.places:
            holder._modules[name] = module
        try:
            yield self.passage
        finally:
            for holder, name, module in aside:
                holder._modules[name] = module
            self.passage.received, self.passage.given = None, None

    def parameters(self) -> list[Tensor]:
        """Its own and those it borrows."""
        tensors = {}
        for module in (each for own in self.modules for each in own.modules()):
            for tensor in (*module.parameters(recurse=False), *vars(module).get("borrowed", ())):
                tensors[id(tensor)] = tensor
        return list(tensors.values())


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of the rank at `owner` along the pipeline that the one at `borrower` computes with too."""

    owner: int
    borrower: int
    holder: nn.Module
    """On the owner the module that has it, on the borrower the one that has what stands for it."""
    name: str
    """There."""

    def lend(self) -> None:
        """Give the borrower the value."""
        here, (value,) = axis("pipeline"), local_tensors([_whole_over_data(self._tensor.detach())])
        if here.place == self.owner:
            dist.send(value.contiguous(), group=here.group, group_dst=self.borrower)
        else:
            dist.recv(value, group=here.group, group_src=self.owner)

    def give_back(self) -> None:
        """Add the borrower's gradient to the owner's."""
        here, tensor = axis("pipeline"), self._tensor
        if not tensor.requires_grad:
            return
        mine = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        if isinstance(tensor, DTensor):
            mine = mine.redistribute(placements=tensor.placements)
        (gradient,) = local_tensors([mine.detach()])
        if here.place == self.borrower:
            dist.send(gradient.contiguous(), group=here.group, group_dst=self.owner)
            tensor.grad = None
        else:
            whole = _whole_over_data(tensor.detach())
            (theirs,) = local_tensors([torch.empty_like(whole)])
            dist.recv(theirs, group=here.group, group_src=self.borrower)
            gradient.add_(_own_part(theirs, whole, tensor))
            tensor.grad = mine

    @property
    def _tensor(self) -> Tensor:
        """Asked for anew each time: who shards a model puts another parameter in the place of each."""
        return getattr(self.holder, self.name)


def _whole_over_data(tensor: Tensor) -> Tensor:
    """A tensor as it is but for the data axis, along which it is gathered where ranks hold parts."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ()
    kept = [place if name not in DATA else Replicate() for name, place in zip(names, tensor.placements, strict=True)]
    return tensor.redistribute(placements=kept)


def _own_part(gradient: Tensor, whole: Tensor, tensor: Tensor) -> Tensor:
    """What this rank adds to its part of the gradient of `tensor`, given that of its own examples for all of it."""
    if not isinstance(tensor, DTensor) or not isinstance(whole, DTensor):
        return gradient
    if set(DATA) & set(tensor.device_mesh.mesh_dim_names or ()):
        dist.all_reduce(gradient, group=axis("data").group)
    summed = DTensor.from_local(gradient, whole.device_mesh, whole.placements, run_check=False)
    return summed.redistribute(placements=tensor.placements).to_local()


def cut_into_stages(
    model: nn.Module, parts: ModelPartition, counts: Sequence[int], places: Sequence[int]
) -> tuple[list[StageModel], list[SharedParameter]]:
    """Leave this rank's stages in a model, and nothing else: stage i has `counts[i]` blocks and is on the rank at
    `places[i]` along the pipeline. Gives this rank's stages and loans."""
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
        made = StageModel(index, index == 0, index == len(counts) - 1, own)
        first = sum(counts[:index])
        beside = {str(first - 1): StageInput, str(first + counts[index]): StageOutput}
        for holder, name, module in holders:
            if stage_of[module] != index:
                kind = beside.get(name) if holder is blocks else StageInput if module in front else None
                made.places.append((holder, name, kind(module, made.passage) if kind else StagePlaceholder(module)))
        stages.append(made)
    loans = _loans(stage_of, places)
    for holder, name, module in holders:
        if places[stage_of[module]] != here:
            holder._modules[name] = StagePlaceholder(module)
    return stages, loans


def _stages(model: nn.Module, parts: ModelPartition, counts: Sequence[int]) -> dict[nn.Module, int]:
    """The stage of each module that is to be on one only."""
    stages = {model.get_submodule(name): 0 for name in parts.front}
    blocks = [block for block in model.get_submodule(parts.stack).children()]
    stages |= dict(zip(blocks, (stage for stage, count in enumerate(counts) for _ in range(count)), strict=True))
    return stages | {model.get_submodule(name): len(counts) - 1 for name in parts.back}


def _refuse_idle(stage_of: Mapping[nn.Module, int], places: Sequence[int]) -> None:
    """Raises RefusedError, on all ranks, where one of them would have no parameter to train."""
    owners: dict[nn.Parameter, int] = {}
    for whole, stage in stage_of.items():
        for parameter in whole.parameters():
            if parameter.requires_grad:
                owners.setdefault(parameter, places[stage])
    if idle := set(places) - set(owners.values()):
        raise RefusedError(
            f"nothing on rank {min(idle)} of the pipeline would be trained",
            fix="train parameters in all blocks, or leave the pipeline out",
        )


def _loans(stage_of: Mapping[nn.Module, int], places: Sequence[int]) -> list[SharedParameter]:
    """Find what ranks share, and let this one's modules compute with what it borrows."""
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
                    del module._parameters[name]  # it is there to be computed with, and under no name
                    vars(module)[name] = stand_in
                    vars(module).setdefault("borrowed", []).append(stand_in)
                loans.append(SharedParameter(owner, borrower, *own[0]))
    return loans
