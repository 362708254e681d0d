"""Activation budget (Jain et al. 2020): recompute, offload or compress saved tensors to fit a memory limit.

Paper       Jain et al. 2020, Checkmate (arXiv 1910.02653), applied within blocks. Offloading follows POFO (Beaumont et
            al. 2021) and POET (Patil et al. 2022, arXiv 2207.07697).
Promise     Activations use at most `bytes`, or the smallest feasible peak if a fraction is smaller. The fastest plan
            found by measured or counted times is used; it is never slower than keeping or recomputing whole blocks.
Use         model = thrifty.apply(model, "activation_budget", bytes=0.5)
Start with  `activation_budget:bytes=0.5`, half of the peak of activations without a limit. `offload=auto` or `bits=4`
            allow smaller limits.
Cost        One extra forward pass and one solver run per batch shape. Each operation of a planned block is dispatched
            through Python.
Avoid       Models that fit in memory, because the plan then keeps all activations.
Does not    Rename parameters, count tensors saved outside the blocks, or change any value unless `bits` allows
            compression.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import StepTrace
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.dry_run import DryRun, dry_run
from thrifty.memory.host_tier import tier_for
from thrifty.memory.op_costs import BYTES_PER_SECOND, MeasuredSeconds, counted_seconds
from thrifty.memory.op_trace import Cost, OpTrace, same_casts
from thrifty.memory.plan_key import plan_key
from thrifty.memory.planner.memory_plan import (
    BlockCosts,
    CompressionOption,
    MemoryPlan,
    OffloadLink,
    costs_of,
    is_streamed,
    peak_when_kept,
)
from thrifty.memory.planner.plan_choice import AllowedActions, agree_on_plan, best_plan, least_peak
from thrifty.memory.planner.plan_report import decisions, summary
from thrifty.memory.planner.plan_storage import Bits, TierStore, build_block_plan, bytes_per_second, stored_bits
from thrifty.memory.recomputation import without_caches
from thrifty.memory.recompute_overhead import measured_overheads
from thrifty.memory.selective_recompute import BlockPlan, keep_tensor, run_block_plan
from thrifty.modeling.attention_cores import LOSING_CORES
from thrifty.modeling.module_surgery import find_stacks, refuse_copies, wrap_forward

OVERHEADS = 45e-6, 12e-6
"""Python overhead in seconds per operation, forward and backward together. The first value is for operations that are
planned one by one, the second value for blocks that are recomputed as a whole. Both are used on a GPU, and on a CPU if
costs are counted from shapes."""
COUNTED_PASSES = 4
"""Assumed number of passes over a tensor for its quantization, and for its dequantization, if costs are counted from
shapes."""
COUNTED_LINK = 1e9
"""Assumed bytes per second of the link to host memory or disk, if costs are counted from shapes."""
MEASURED = MeasuredSeconds()
"""Measured costs, shared so that `explain` and the run use the same measurements."""


class ActivationPlanner:
    """Planner that computes a plan for each `plan_key` and applies it to the blocks in call order."""

    def __init__(self, settings: "ActivationBudget"):
        self.settings = settings
        self.plans: dict[Any, tuple[list[BlockCosts], MemoryPlan]] = {}
        self.blocks: list[str] = []
        """Names of the blocks, in the order of the model."""
        self.chain: BlockChain | None = None
        """Chain of `blocks`, if they may be recomputed together."""
        self.current: list[BlockPlan] = []
        self.called = 0
        self.store: TierStore | None = None
        self.rehearsal: DryRun | None = None
        self.seed, self.passes = 0, 0

    def run(self, name: str, block: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
        if self.rehearsal is None and self.called == len(self.current):  # without gradients, as in generation
            return inner(*args, **kwargs)
        args, kwargs = without_caches(args, block), without_caches(kwargs, block)
        if self.rehearsal is not None:
            return self.rehearsal.run(name, block, inner, args, kwargs)
        place, self.called = self.called, self.called + 1
        if self.chain and self.chain.schedule:
            with same_casts():
                return inner(*args, **kwargs)
        if self.store:
            self.store.finish_transfer(place - 2)
            self.store.end_stream(place - 1)
        return run_block_plan(self.current[place], inner, args, kwargs)

    def predict(self, objective: Objective, model: nn.Module, batch: Batch) -> Prediction:
        key = (*batch.fields, plan_key(model, batch.fields.values()))
        if key not in self.plans:
            self.plans[key] = self.plan(objective, model, batch)
        if self.settings.offload != "never":
            self.store = TierStore(tier_for(self.settings.offload, batch.weight, self.settings.folder))
        self.current, self.called = self.block_plans(*self.plans[key]), 0
        if self.chain:
            self.chain.schedule = self.plans[key][1].schedule
        try:
            return objective.predict(model, batch)
        finally:
            if self.chain:
                self.chain.schedule = None
            for place in range(self.called if self.store else 0):
                self.store.finish_transfer(place)
                self.store.end_stream(place)
            self.current, self.called, self.store = [], 0, None

    def plan(self, objective: Objective, model: nn.Module, batch: Batch) -> tuple[list[BlockCosts], MemoryPlan]:
        learned, rest = self.rehearse(objective, model, batch)
        counted = self.settings.cost is counted_seconds or batch.weight.device.type != "cpu"
        overheads = OVERHEADS if counted else measured_overheads()
        blocks = [costs_of(*each, overheads) for each in zip(learned.tapes, learned.memories, strict=True)]
        if self.chain is None or learned.names != self.blocks or LOSING_CORES.get(model) is not None:
            blocks = [replace(block, stage=None) for block in blocks]
        blocks.append(rest)  # the last entry, without decisions
        plan = agree_on_plan(self.settings.solve(blocks, batch.weight.device), blocks)
        for line in (summary(blocks, plan), *decisions(learned.names, blocks, plan)):
            add_note(line)
        return blocks, plan

    def rehearse(self, objective: Objective, model: nn.Module, batch: Batch) -> tuple[DryRun, BlockCosts]:
        """Record the operations of the blocks in a step. Return them, and the costs outside the blocks: saved tensors
        and loss."""
        known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
        try:
            streams = bool(self.settings.bits) or self.settings.offload != "never"
            with dry_run(model, self.settings.cost, streams) as self.rehearsal, StepTrace(*known) as live:
                prediction = objective.predict(model, batch)
                self.rehearsal.settle()
                outside = live.peak = live.now
                ends = [end for end in (prediction.hidden, prediction.output) if end is not None and end.requires_grad]
                edges = [get_gradient_edge(end) for end in ends]
                loss = (objective.losses(prediction, batch) * batch.weight).sum()
                del prediction, ends  # as in a step, where only the loss refers to them
                if edges:  # without gradients if only the head is trained
                    torch.autograd.grad(loss, edges, allow_unused=True)
                del loss
                rest = BlockCosts(OpTrace(input_bytes=outside), live.peak - outside, 0.0, 0.0, 0.0)
            return self.rehearsal, rest
        finally:
            self.rehearsal = None

    def block_plans(self, blocks: Sequence[BlockCosts], plan: MemoryPlan) -> list[BlockPlan]:
        """Return the plan of each block for one forward pass."""
        key, plans = self._key_of_pass(), []
        for place, (block, actions) in enumerate(zip(blocks[:-1], plan.actions, strict=False)):
            keep = keep_tensor
            if self.store:
                keep = self.store.stream(place) if is_streamed(block, actions) else self.store.store(place)
            plans.append(build_block_plan(block, actions, keep, self.settings.bits, f"{key}/{place}"))
        return plans

    def _key_of_pass(self) -> str:
        """Return a key of a forward pass. A repeated step has the same keys as its first run; all other keys are
        unique."""
        seed = torch.initial_seed()
        self.seed, self.passes = seed, self.passes + 1 if seed == self.seed else 0
        return f"{seed}/{self.passes}"


ACTIVATION_PLANNER: ModuleNote[ActivationPlanner] = ModuleNote("activation_planner")


class PlannedObjective(WrappedObjective):
    """Wrapper of an objective that runs the model by the plans of an `ActivationPlanner`."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        planner = ACTIVATION_PLANNER.get(model)
        if planner is None or not torch.is_grad_enabled():
            return super().predict(model, batch)
        return planner.predict(self.inner, model, batch)


class ForwardPass(Objective):
    """An objective that calls a model with any arguments. The objective's loss replaces the caller's loss, which is
    unknown."""

    def __init__(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.inner, self.args, self.kwargs = inner, args, kwargs

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.result = self.inner(*self.args, **self.kwargs)
        learned = (each for each in tree_leaves(self.result) if isinstance(each, Tensor) and each.requires_grad)
        return Prediction(output=next(learned, None))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits.float().mean().expand(len(batch))


def _planned_forward(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    planner = ACTIVATION_PLANNER.get(model)
    if planner is None or not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    rows = next((each for each in inputs if each.ndim), torch.ones(1))
    batch = Batch({str(place): each for place, each in enumerate(inputs)}, rows.new_ones(len(rows)).float())
    objective = ForwardPass(inner, args, kwargs)
    planner.predict(objective, model, batch)
    return objective.result


class ActivationBudget(Technique):
    """Two plans are computed, and the faster one is used. The first is a plan for single tensors. The second is the
    best schedule of whole blocks (Beaumont et al. 2019). Recomputing a whole block has less Python overhead than
    recomputing single operations. Both overheads are measured on a CPU unless costs are counted. Differs from
    Checkmate: tensors may also be compressed.

    Costs are measured on this machine, operation by operation, or counted from shapes. With compression, costs are
    counted, and the solver stops after the same number of search steps on any machine. A resumed run then computes the
    same plan. Without compression the solver stops after 20 s. On a CPU, freed memory is returned to the system at
    once, so that the process stays within the limit.
    """

    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT
    claims = frozenset({Claim.SAVED_TENSORS, Claim.RECOMPUTATION, Claim.ACTIVATION_BYTES, Claim.RANK_WIDE_PLAN})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.COMPILED_BLOCKS: "it plans single operations, and a compiler fuses them",
        Claim.TENSOR_PARALLELISM: "it plans single operations, and one rank cannot recompute a collective operation",
    }

    bytes: Annotated[float, SettingBound(above=0)] = 0.5
    """Maximum activation memory in bytes. A value up to 1 is relative to the peak without a limit. If recomputation
    cannot reach a relative limit, the smallest feasible peak is the limit."""
    recompute: bool = True
    """True to allow recomputation."""
    bits: Bits = 0
    """Bits per element of compressed tensors (2, 4 or 8); gradients become noisy. 0 turns compression off."""
    offload: Literal["never", "auto", "host", "disk", "simulated"] = "never"
    """Memory to which tensors may be offloaded; "auto" is the host for a GPU and the disk for a CPU."""
    folder: str = ""
    """Folder of tensors offloaded to disk; $TMPDIR or /var/tmp by default."""
    cost_source: Literal["measured", "counted"] = "measured"
    """Source of the costs of operations: timed on this machine, or counted from shapes. `bits` implies "counted"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits:
            object.__setattr__(self, "numerics", Numerics.DIFFERENT)

    @property
    def cost(self) -> Cost:
        return counted_seconds if self.bits or self.cost_source == "counted" else MEASURED

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        planner = ActivationPlanner(self)
        stacks = find_stacks(model)
        for name, blocks in stacks.items():
            names = {block: f"{name}.{place}" for place, block in enumerate(blocks)}
            planner.blocks += (names[block] for block in blocks)
            for block, own in names.items():  # once per block, even if it is used several times
                wrap_forward(block, partial(planner.run, own))
            add_note(f"{len(blocks)} blocks in {name or 'the model'}; the plan is computed in the first step")
        if self.recompute:
            planner.chain = BlockChain([block for blocks in stacks.values() for block in blocks], None)
        ACTIVATION_PLANNER.set(model, planner)
        refuse_copies(model, self.name, in_evaluation=True)
        return model

    def objective(self, objective: Objective) -> Objective:
        return PlannedObjective(objective)

    def change_forward(self, model: nn.Module) -> None:
        wrap_forward(model, _planned_forward)

    def finish(self, model: nn.Module) -> nn.Module:
        ACTIVATION_PLANNER.remove(model)
        return model

    def solve(self, blocks: list[BlockCosts], device: torch.device) -> MemoryPlan:
        """Return the fastest plan for these blocks. Raise InfeasibleError if no plan fits a budget in bytes."""
        allowed = AllowedActions(self.recompute, self._compression(device), self._link(device))
        kept, least = peak_when_kept(blocks), least_peak(blocks, allowed)
        budget = self.bytes * kept if self.bytes <= 1 else self.bytes
        if self.bytes <= 1 and self.recompute:
            budget = max(budget, least)
        plan = best_plan(blocks, budget, allowed)
        if plan is None:
            actions = {"recomputed": self.recompute, "offloaded": allowed.link, "compressed": allowed.compression}
            allowed_words = " or ".join(word for word, is_allowed in actions.items() if is_allowed)
            more = f"bytes={least * 1.02:.3g}" if self.recompute else "recompute=true"
            raise InfeasibleError(
                f"{self.name}: {len(blocks) - 1} blocks do not fit {budget / 1e6:,.2f} MB; with everything "
                f"{allowed_words or 'kept'} they take {least / 1e6:,.2f} MB, with everything kept {kept / 1e6:,.2f} MB",
                fix=f"--set techniques.{self.name}.{more}",
            )
        return plan

    def _compression(self, device: torch.device) -> CompressionOption | None:
        if not self.bits:
            return None
        counted = 2 * COUNTED_PASSES / BYTES_PER_SECOND.get(device.type, 1e12)
        return CompressionOption(stored_bits(self.bits), counted)

    def _link(self, device: torch.device) -> OffloadLink | None:
        if self.offload == "never":
            return None
        if self.cost is counted_seconds:
            return OffloadLink(COUNTED_LINK)
        return OffloadLink(bytes_per_second(self.offload, self.folder, device))
