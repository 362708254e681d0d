"""Report of a memory plan."""

from thrifty.memory.op_trace import OpOutput, OpTrace
from thrifty.memory.planner.memory_plan import BlockCosts, MemoryPlan, TensorAction
from thrifty.memory.planner.plan_report import decisions


def test_blocks_with_same_decisions_share_a_line() -> None:
    tape = OpTrace(items={0: OpOutput(0, "mul", "mlp", bytes=2_000_000, seconds=0.003, saved_bytes=2_000_000)})
    blocks = [BlockCosts(tape, 0, 0.0, 0.0, 0.0) for _ in range(6)]
    again, kept = {0: TensorAction.RECOMPUTE}, {0: TensorAction.KEEP}
    plan = MemoryPlan((again, again, again, kept, again, again), 0.0, 0.0, 0.0)
    names = [f"encoder.{number}" for number in range(5)] + ["decoder.0"]
    assert decisions(names, blocks, plan) == [
        "encoder.0-2, 4 (4 blocks): mlp mul, 2.00 MB: recompute; costs 3.00 ms",
        "encoder.3: mlp mul, 2.00 MB: keep; would cost 3.00 ms to recompute",
        "decoder.0: mlp mul, 2.00 MB: recompute; costs 3.00 ms",
    ]


def test_whole_recomputed_block_has_a_line_before_its_tensors() -> None:
    tape = OpTrace(items={0: OpOutput(0, "mul", "mlp", bytes=2_000_000, seconds=0.003, saved_bytes=2_000_000)})
    blocks = [BlockCosts(tape, 0, 0.0, 0.003, 0.0, whole=0.004)] * 2
    plan = MemoryPlan(({0: TensorAction.RECOMPUTE}, {0: TensorAction.KEEP}), 0.0, 0.0, 0.0)
    assert decisions(["h.0", "h.1"], blocks, plan) == [
        "h.0: recomputed as a whole; costs 4.00 ms",
        "h.0: mlp mul, 2.00 MB: recompute; costs 3.00 ms",
        "h.1: mlp mul, 2.00 MB: keep; would cost 3.00 ms to recompute",
    ]
