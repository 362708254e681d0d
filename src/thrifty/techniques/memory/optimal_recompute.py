"""Optimal recompute (Beaumont et al. 2019): recompute as little as a memory budget requires.

Paper       Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains (hal-02352969), a dynamic program over
            the blocks.
Promise     Activations, gradients and temporary tensors of the blocks never exceed `bytes`. By the predicted costs, no
            periodic schedule within the budget is faster.
Use         model.config.use_cache = False
            model = thrifty.apply(model, "optimal_recompute", bytes=0.5)
Start with  `optimal_recompute:bytes=0.5`, half of the peak without recomputation.
Cost        Each block runs once on fake tensors before the first step and for each new batch shape.
Avoid       Models that fit in memory, because nothing is then recomputed.
Does not    Change any value (dropout included), rename parameters, or count tensors outside the blocks (embedding, head
            and loss).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import tensors_in
from thrifty.memory.block_chain_costs import survey
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.plan_key import plan_key
from thrifty.memory.planner.chain_schedule import least_bytes, optimal_schedule, periodic_schedule, simulate
from thrifty.memory.recompute_schedule import ChainCost, RecomputeSchedule
from thrifty.modeling.module_surgery import find_stacks, refuse_copies, wrap_forward


def bytes_allowed(budget: float, chain: ChainCost) -> int:
    """Return a memory limit in bytes. A value up to 1 is relative to the peak without recomputation.

    A relative limit is at least the smallest possible peak.
    """
    if budget > 1:
        return int(budget)
    _, peak = simulate(chain, periodic_schedule(len(chain), len(chain)))
    return max(int(budget * peak), least_bytes(chain))


class ScheduledRecompute:
    """A wrapper of a model that computes the best recomputation schedule of the blocks for each input shape."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], budget: float, timed: bool = False):
        self.chain = BlockChain(blocks, RecomputeSchedule())
        self.budget, self.timed = budget, timed
        self.schedules: dict[Hashable, RecomputeSchedule] = {}
        wrap_forward(model, self.forward)

    def forward(self, model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            key = plan_key(model, tensors_in((args, kwargs)))
            if key not in self.schedules:
                self.schedules[key] = self.plan(model, inner, args, kwargs)
            self.chain.schedule = self.schedules[key]
        return inner(*args, **kwargs)

    def plan(self, model: nn.Module, inner: Callable[..., Any], args: tuple, kwargs: dict) -> RecomputeSchedule:
        cost = survey(model, self.chain, inner, args, kwargs, self.timed)
        return RecomputeSchedule.of(optimal_schedule(cost, bytes_allowed(self.budget, cost)))


class OptimalRecompute(Technique):
    """In each forward pass and in each recomputation, a block saves all activations, only its input, or nothing. A
    block that computes the same as an earlier block is measured in half the time. On a CPU, freed memory is returned to
    the system at once, to keep the limit."""

    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT
    claims = frozenset({Claim.RECOMPUTATION, Claim.ACTIVATION_BYTES})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.TENSOR_PARALLELISM: "costs are measured on one rank, and layers compute on several",
        Claim.AUXILIARY_LOSSES: "only the last result of a recomputed chain is part of the graph",
    }

    bytes: Annotated[float, SettingBound(above=0)] = 0.5
    """Limit in bytes. A value up to 1 is relative to the peak of the blocks without recomputation. A relative limit is
    at least the smallest possible peak."""
    cost_source: Literal["counted", "measured"] = "counted"
    """Source of the costs of a block: FLOPs and bytes, or seconds of a real forward pass. The source does not change
    results."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_stacks(model)
        blocks = [block for stack in stacks.values() for block in stack]
        ScheduledRecompute(model, blocks, self.bytes, timed=self.cost_source == "measured")
        refuse_copies(model, self.name, in_evaluation=True)
        budget = f"{self.bytes:,.0f} bytes" if self.bytes > 1 else f"{self.bytes:.0%} of the plain peak"
        add_note(f"{len(blocks)} blocks in {', '.join(name or 'the model' for name in stacks)}, within {budget}")
        return model
