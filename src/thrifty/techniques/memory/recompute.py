"""Activation checkpointing (Chen et al. 2016): save block inputs and recompute the rest in the backward pass.

Paper       Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), sections 3 and 4. The
            selective schedule is from Korthikanti et al. 2022 (arXiv 2205.05198).
Promise     Memory holds the activations of one block, and the inputs of all blocks, instead of all activations.
Use         model = thrifty.apply(model, "recompute", every=1)
Start with  `recompute:every=1`. `every=2` or `schedule=selective` cost less time, but save less memory, than `every=1`.
Cost        About one third more computation with `every=1`.
Avoid       Models that fit in memory, because recomputation then only costs time.
Does not    Change any value (dropout included), or rename parameters.
"""

import math
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, create_selective_checkpoint_contexts

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.op_flops import FLOPS_OF
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.planner.chain_schedule import periodic_schedule
from thrifty.memory.recomputation import RERUN_FIX, recompute
from thrifty.memory.recompute_schedule import RecomputeSchedule
from thrifty.modeling.attention_cores import LOSING_CORES
from thrifty.modeling.module_surgery import find_stacks, wrap_forward


def recompute_block(module: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block without saving its intermediate tensors. The backward pass recomputes them."""
    return recompute(inner, args, kwargs, module)


def recompute_between_products(module: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block and save only the results of matmuls and attention. The backward pass recomputes all other
    tensors."""
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    return recompute(inner, args, kwargs, module, context_fn=contexts)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    counted = getattr(operation, "overloadpacket", None) in FLOPS_OF
    return CheckpointPolicy.MUST_SAVE if counted else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_segments(blocks: list[nn.Module]) -> int:
    """Divide n blocks into segments of sqrt(n) blocks, each recomputed as a whole; return the length of a segment."""
    length = math.isqrt(len(blocks) - 1) + 1
    BlockChain(blocks, RecomputeSchedule.of(periodic_schedule(len(blocks), length)))
    return length


def explain_other_tensors(backward: Backward) -> Backward:
    """Return a backward pass that raises IntegrityError with a fix instead of torch's CheckpointError."""

    def explained(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        try:
            return backward(model, objective, batch)
        except CheckpointError as error:
            what = "the recomputation of a block saved other tensors than its first forward pass"
            raise IntegrityError(what, fix=RERUN_FIX) from error

    return explained


class Recompute(Technique):
    """Schedules:

    every      one block in `every` saves only its input and is recomputed by itself
    sqrt       n blocks form segments of sqrt(n); all but the last segment save only their input and are recomputed
    selective  results of matrix products and attention are saved; only operations between them are recomputed

    "sqrt" is for chains of small layers. A Transformer block saves much more than its input, so "every" takes less
    memory than "sqrt" up to hundreds of blocks.
    """

    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT
    claims = frozenset({Claim.RECOMPUTATION})

    every: Positive = 1
    """Distance between recomputed blocks of a stack: 1 is all blocks, 2 is every second block. Must be 1 for "sqrt"."""
    schedule: Literal["every", "sqrt", "selective"] = "every"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "sqrt" and self.every != 1:
            raise UsageError(
                f"{self.name}: every is {self.every}, but the schedule 'sqrt' recomputes all blocks",
                fix=f"--set techniques.{self.name}.every=1; or --set techniques.{self.name}.schedule=every",
            )

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    @property
    def recomputation(self) -> Literal["selective", "every"]:
        return "selective" if self.schedule == "selective" else "every"

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_stacks(model)
        if self.schedule == "sqrt":
            if LOSING_CORES.get(model) is not None:
                raise RefusedError(
                    "blocks return an additional loss, which the schedule 'sqrt' would discard",
                    fix=f"--set techniques.{self.name}.schedule=every",
                )
            blocks = [block for stack in stacks.values() for block in stack]
            add_note(f"{len(blocks)} blocks in {', '.join(stacks)}, in segments of {recompute_segments(blocks)}")
            return model
        wrapper = recompute_between_products if self.schedule == "selective" else recompute_block
        for name, stack in stacks.items():
            for block in dict.fromkeys(list(stack)[:: self.every]):
                wrap_forward(block, wrapper)
            add_note(f"{len(stack[:: self.every])} of {len(stack)} blocks in {name or 'the model'}")
        return model

    def backward(self, backward: Backward) -> Backward:
        return explain_other_tensors(backward)
