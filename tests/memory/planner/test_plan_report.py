"""A memory plan as a person reads it."""

from thrifty.memory.op_trace import OpOutput, OpTrace
from thrifty.memory.planner.memory_plan import BlockCosts, MemoryPlan, TensorAction
from thrifty.memory.planner.plan_report import decisions


def test_blocks_with_the_same_decisions_are_told_together_by_number_and_stack() -> None:
    tape = OpTrace(items={0: OpOutput(0, "mul", "mlp", bytes=2_000_000, seconds=0.003, saved_bytes=2_000_000)})
    blocks = [BlockCosts(tape, 0, 0.0, 0.0, 0.0) for _ in range(6)]
    again, kept = {0: TensorAction.RECOMPUTE}, {0: TensorAction.KEEP}
    plan = MemoryPlan((again, again, again, kept, again, again), 0.0, 0.0, 0.0)
    names = [f"encoder.{number}" for number in range(5)] + ["decoder.0"]
    assert decisions(names, blocks, plan) == [
        "encoder.0-2, 4 (4 blocks): mlp mul, 2.00 MB: recompute; costs 3.00 ms",
        "encoder.3: mlp mul, 2.00 MB: keep; would cost 3.00 ms to make again",
        "decoder.0: mlp mul, 2.00 MB: recompute; costs 3.00 ms",
    ]


def test_a_block_that_is_made_again_as_a_whole_says_so_before_its_tensors() -> None:
    tape = OpTrace(items={0: OpOutput(0, "mul", "mlp", bytes=2_000_000, seconds=0.003, saved_bytes=2_000_000)})
    blocks = [BlockCosts(tape, 0, 0.0, 0.003, 0.0, whole=0.004)] * 2
    plan = MemoryPlan(({0: TensorAction.RECOMPUTE}, {0: TensorAction.KEEP}), 0.0, 0.0, 0.0)
    assert decisions(["h.0", "h.1"], blocks, plan) == [
        "h.0: made again as a whole; costs 4.00 ms",
        "h.0: mlp mul, 2.00 MB: recompute; costs 3.00 ms",
        "h.1: mlp mul, 2.00 MB: keep; would cost 3.00 ms to make again",
    ]
