"""Activation budget (Jain et al. 2020): recompute, offload or compress saved tensors to fit a memory limit.

Paper       Jain et al. 2020, Checkmate (arXiv 1910.02653) within blocks; offload: POFO (Beaumont et al. 2021), POET
            (Patil et al. 2022, arXiv 2207.07697).
Promise     Activations within `bytes`, at the smallest extra time that measured or counted costs predict. The plan is
            never slower than the best schedule of whole blocks.
Use         model = thrifty.apply(model, "activation_budget", bytes=0.5)
Start with  `activation_budget:bytes=0.5`; `offload=auto` or `bits=4` allow more savings.
Cost        One extra forward pass and a solver run per batch shape. Each operation of a planned block passes through
            Python.
Avoid       Models that fit: the plan then keeps everything.
Does not    Change any value unless `bits` allows compression. Count tensors saved outside the blocks.
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
from thrifty.memory.recompute_overhead import measured_overheads
from thrifty.memory.selective_recompute import BlockPlan, keep_tensor, run_block_plan
from thrifty.modeling.attention_sites import LOSING_CORES
from thrifty.modeling.module_surgery import find_stacks, refuse_copies, wrap_forward

OVERHEADS = 45e-6, 12e-6
"""Seconds that each operation of a block costs in Python, both ways together, where its operations are followed one by
one, and where it is made again as a whole; where costs are counted, and beside a GPU."""
COUNTED_PASSES = 4
"""Times that either direction of coding goes over a tensor, where costs are counted."""
COUNTED_LINK = 1e9
"""Bytes per second of the way to a tier, where costs are counted."""
MEASURED = MeasuredSeconds()
"""Shared, so that what is explained is what is run."""


class ActivationPlanner:
    """Makes a plan for each shape of batch that comes, and hands it out to the blocks in the order they are called."""

    def __init__(self, settings: "ActivationBudget"):
        self.settings = settings
        self.plans: dict[Any, tuple[list[BlockCosts], MemoryPlan]] = {}
        self.blocks: list[str] = []
        """Names, in the order of the model."""
        self.chain: BlockChain | None = None
        """Of the same blocks, where they may be made again together."""
        self.current: list[BlockPlan] = []
        self.called = 0
        self.elsewhere: TierStore | None = None
        self.rehearsal: DryRun | None = None
        self.seed, self.passes = 0, 0

    def run(self, name: str, block: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
        if self.rehearsal is not None:
            return self.rehearsal.run(name, block, inner, args, kwargs)
        if self.called == len(self.current):  # nothing is trained: evaluation, sampling
            return inner(*args, **kwargs)
        place, self.called = self.called, self.called + 1
        if self.chain and self.chain.schedule:
            with same_casts():
                return inner(*args, **kwargs)
        if self.elsewhere:
            self.elsewhere.finish_transfer(place - 2)
            self.elsewhere.end_stream(place - 1)
        return run_block_plan(self.current[place], inner, args, kwargs)

    def predict(self, objective: Objective, model: nn.Module, batch: Batch) -> Prediction:
        key = tuple((name, tensor.shape) for name, tensor in batch.fields.items())
        if key not in self.plans:
            self.plans[key] = self.plan(objective, model, batch)
        if self.settings.offload != "never":
            self.elsewhere = TierStore(tier_for(self.settings.offload, batch.weight, self.settings.folder))
        self.current, self.called = self.block_plans(*self.plans[key]), 0
        if self.chain:
            self.chain.schedule = self.plans[key][1].schedule
        try:
            return objective.predict(model, batch)
        finally:
            if self.chain:
                self.chain.schedule = None
            for place in range(self.called if self.elsewhere else 0):
                self.elsewhere.finish_transfer(place)
                self.elsewhere.end_stream(place)
            self.current, self.called, self.elsewhere = [], 0, None

    def plan(self, objective: Objective, model: nn.Module, batch: Batch) -> tuple[list[BlockCosts], MemoryPlan]:
        learned, rest = self.rehearse(objective, model, batch)
        counted = self.settings.cost is counted_seconds or batch.weight.device.type != "cpu"
        overheads = OVERHEADS if counted else measured_overheads()
        blocks = [costs_of(*each, overheads) for each in zip(learned.tapes, learned.memories, strict=True)]
        if self.chain is None or learned.names != self.blocks or LOSING_CORES.get(model) is not None:
            blocks = [replace(block, stage=None) for block in blocks]
        blocks.append(rest)  # comes last and has nothing to decide
        plan = agree_on_plan(self.settings.solve(blocks, batch.weight.device), blocks)
        for line in (summary(blocks, plan), *decisions(learned.names, blocks, plan)):
            add_note(line)
        return blocks, plan

    def rehearse(self, objective: Objective, model: nn.Module, batch: Batch) -> tuple[DryRun, BlockCosts]:
        """What the blocks do, and what everything else holds: what is saved outside of them, and the loss."""
        known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
        try:
            streams = bool(self.settings.bits) or self.settings.offload != "never"
            with dry_run(model, self.settings.cost, streams) as self.rehearsal, StepTrace(*known) as live:
                prediction = objective.predict(model, batch)
                self.rehearsal.settle()
                outside = live.peak = live.now
                ends = [end for end in (prediction.hidden, prediction.given) if end is not None and end.requires_grad]
                edges = [get_gradient_edge(end) for end in ends]
                loss = (objective.losses(prediction, batch) * batch.weight).sum()
                del prediction, ends  # as in a step, where the loss alone holds what it needs
                if edges:  # none where nothing but the head is trained
                    torch.autograd.grad(loss, edges, allow_unused=True)
                del loss
                rest = BlockCosts(OpTrace(input_bytes=outside), live.peak - outside, 0.0, 0.0, 0.0)
            return self.rehearsal, rest
        finally:
            self.rehearsal = None

    def block_plans(self, blocks: Sequence[BlockCosts], plan: MemoryPlan) -> list[BlockPlan]:
        """What one forward pass follows."""
        key, plans = self._key_of_pass(), []
        for place, (block, ways) in enumerate(zip(blocks[:-1], plan.actions, strict=False)):
            elsewhere = keep_tensor
            if self.elsewhere:
                elsewhere = self.elsewhere.stream(place) if is_streamed(block, ways) else self.elsewhere.store(place)
            plans.append(build_block_plan(block, ways, elsewhere, self.settings.bits, f"{key}/{place}"))
        return plans

    def _key_of_pass(self) -> str:
        """Another one for each forward pass, the same when the step is made again."""
        seed = torch.initial_seed()
        self.seed, self.passes = seed, self.passes + 1 if seed == self.seed else 0
        return f"{seed}/{self.passes}"


ACTIVATION_PLANNER: ModuleNote[ActivationPlanner] = ModuleNote("activation_planner")


class PlannedObjective(WrappedObjective):
    """Another objective whose model runs by its planner's plans."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        planner = ACTIVATION_PLANNER.get(model)
        if planner is None or not torch.is_grad_enabled():
            return super().predict(model, batch)
        return planner.predict(self.inner, model, batch)


class ForwardPass(Objective):
    """One call of a model's forward pass with arguments of any form; its loss stands for one that is not known."""

    def __init__(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.inner, self.args, self.kwargs = inner, args, kwargs

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        self.result = self.inner(*self.args, **self.kwargs)
        learned = (each for each in tree_leaves(self.result) if isinstance(each, Tensor) and each.requires_grad)
        return Prediction(given=next(learned, None))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits.float().mean().expand(len(batch))


def _planned_forward(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    planner = ACTIVATION_PLANNER.get(model)
    if planner is None or not torch.is_grad_enabled():
        return inner(*args, **kwargs)
    inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    batch = Batch({str(place): each for place, each in enumerate(inputs)}, inputs[0].new_ones(len(inputs[0])).float())
    objective = ForwardPass(inner, args, kwargs)
    planner.predict(objective, model, batch)
    return objective.result


class ActivationBudget(Technique):
    """The plan is the faster of two: a plan for single tensors, and the best schedule of whole blocks (Beaumont et al.
    2019). Differs from Checkmate: tensors may also be compressed.

    Costs are measured on this machine, operation by operation, or counted from shapes. With compression they are
    counted, and the solver stops after the same amount of search on any machine. A resumed run then makes the same
    plan. Otherwise it stops after 20 s. On a CPU freed memory is returned to the system at once, so that the process
    stays within the limit.
    """

    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT
    claims = frozenset({Claim.SAVED_TENSORS, Claim.RECOMPUTATION, Claim.ACTIVATION_BYTES, Claim.RANK_WIDE_PLAN})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.COMPILED_BLOCKS: "it follows single operations, which a compiler fuses",
        Claim.TENSOR_PARALLELISM: "it follows single operations, and those between ranks cannot be made again by one",
    }

    bytes: Annotated[float, SettingBound(above=0)] = 0.5
    """For all activations at the peak, in bytes; up to 1 a share of what they take when all are kept, or what they take
    when all may be made again and that is more."""
    recompute: bool = True
    """Whether tensors may be made again."""
    bits: Bits = 0
    """Whether tensors may be compressed, to 2, 4 or 8 bits a number, which makes gradients noisy; 0 is no."""
    offload: Literal["never", "auto", "host", "disk", "simulated"] = "never"
    """Where tensors may wait: the host's memory, a disk, or either as the device has it."""
    folder: str = ""
    """For files; $TMPDIR or /var/tmp by default."""
    cost_source: Literal["measured", "counted"] = "measured"
    """Of an operation: timed on this machine, or told from its shapes; counted wherever `bits` are allowed."""

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
            for block, own in names.items():  # each once, in however many places it is
                wrap_forward(block, partial(planner.run, own))
            add_note(f"{len(blocks)} blocks in {name or 'the model'}; the plan is made at the first step")
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
        """The fastest plan for these blocks; raises InfeasibleError where a budget in bytes allows none."""
        allowed = AllowedActions(self.recompute, self._compression(device), self._link(device))
        kept, least = peak_when_kept(blocks), least_peak(blocks, allowed)
        budget = self.bytes * kept if self.bytes <= 1 else self.bytes
        if self.bytes <= 1 and self.recompute:
            budget = max(budget, least)
        plan = best_plan(blocks, budget, allowed)
        if plan is None:
            may_be = {"made again": self.recompute, "moved": allowed.link, "compressed": allowed.compression}
            given_up = " or ".join(words for words, is_allowed in may_be.items() if is_allowed)
            more = f"bytes={least * 1.02:.3g}" if self.recompute else "recompute=true, or more bytes"
            raise InfeasibleError(
                f"{self.name}: {len(blocks) - 1} blocks do not fit {budget / 1e6:,.2f} MB; with everything "
                f"{given_up or 'kept'} they take {least / 1e6:,.2f} MB, with everything kept {kept / 1e6:,.2f} MB",
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
