"""Work of each rank in tests of parallelism, in a module that a new process can import."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from technique_runs import RUNS
from tiny_runs import VOCABULARY, advance, evaluated_loss, losses, plain_run, technique, with_optimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.compose import Run as Composition
from thrifty.composition.explain import explain
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import AXES, USED_BY, set_mesh
from thrifty.core.state import full_value
from thrifty.core.technique import Technique
from thrifty.optim.mask_selection import random_mask
from thrifty.planning.step_timing import time_steps

STEPS = 4


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    tensors: dict[str, str]
    """Digest of each tensor that this rank holds whole, and a marker for divided ones."""
    sharded: int
    """Number of sharded parameters."""
    evaluated: float
    """Loss of the evaluated weights, which may be an average, on the first batch."""


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in tensors.items()}


def digest(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        if not all(isinstance(placement, Replicate) for placement in tensor.placements):
            return "divided"
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if not tensor.dim() or not tensor.numel():
        return str(tensor)
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def plain_with(name: str) -> BaseRun:
    """Return the run of a technique on ranks."""
    return RUNS[name]() if name in RUNS else plain_run(tied=name != "optimizers.lion")


def train_with_each(strategy: Sequence[Technique], names: Sequence[str]) -> dict[str, Run]:
    """Return a run for each technique that combines with the strategy."""
    found = {}
    for name in names:
        try:
            run = compose(plain_with(name), with_optimizer([*strategy, technique(name)]), STEPS)
        except UsageError:
            continue
        found[name] = trained(run)
    return found


def trained(run: Composition) -> Run:
    state = run.start()
    records = advance(run, state)
    run.verify(state)
    assert state.model is not None
    parts = [p for p in state.model.parameters() if isinstance(p, DTensor) and p.to_local().shape != p.shape]
    norms, tensors = [record.gradient_norm for record in records], digests(state.tensors())
    return Run(losses(records), norms, tensors, len(parts), evaluated_loss(run, state))


@cache
def alone(name: str, *also: Technique) -> Run:
    """Return the run of one process with a technique and others."""
    torch._dynamo.reset()
    return trained(compose(plain_with(name), with_optimizer([*also, technique(name)]), STEPS))


def refusals(strategy: str) -> list[str]:
    run = compose(plain_run(batch=3), with_optimizer([technique(strategy)]), STEPS)
    try:
        return [str(run.source)]
    except RefusedError as refused:
        return [refused.what, refused.fix]


def predicted(strategies: Sequence[Technique]) -> list[tuple[Footprint, Footprint]]:
    """Return the footprint of the plain run, and with each technique."""
    found = [explain(compose(plain_run(), with_optimizer([strategy]), STEPS)) for strategy in strategies]
    return [(explanation.plain, explanation.footprint) for explanation in found]


def masks_and_copies() -> tuple[bool, bool, bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(4, 3)
    sharded, replicated = (distribute_tensor(whole.clone(), mesh, [kind]) for kind in (Shard(0), Replicate()))
    mask = random_mask(sharded, 0.5, "key")
    same = torch.equal(full_value(mask), random_mask(whole, 0.5, "key"))
    copy = full_value(replicated)
    replicated.to_local().zero_()
    return same, torch.equal(copy, whole), bool(full_value(replicated).any())


def probed(name: str) -> dict[str, Any]:
    """Probe some steps with a technique on all ranks."""
    set_mesh({axis: dist.get_world_size() if USED_BY[axis][1] == name else 1 for axis in AXES}, "cpu")
    settings = {"micro_batches": 2} if name == "parallelism.pipeline" else {}
    run = compose(plain_run(batch=4), with_optimizer([technique(name, **settings)]), 20)
    return time_steps(run, (4,), 1, [run.plain.source.at(0)], 0.1).as_dict()


class NormalizedBlock(nn.Module):
    """A linear layer after a BatchNorm with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x.flatten(0, 1)).view_as(x))


class NormalizedModel(nn.Module):
    has_separate_head = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(NormalizedBlock(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def trained_with_batch_norm(strategy: str) -> Run:
    plain = plain_run()
    run = BaseRun(NormalizedModel, plain.source, plain.objective)
    return trained(compose(run, with_optimizer([technique(strategy)]), STEPS))
