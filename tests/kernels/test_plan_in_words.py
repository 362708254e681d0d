"""A memory plan as a person reads it."""

from thrifty.core.activations.tape import Item, Tape
from thrifty.kernels.memory_plan import BlockCosts, MemoryPlan, Way
from thrifty.kernels.plan_in_words import decisions


def test_blocks_with_the_same_decisions_are_told_together_by_number_and_stack() -> None:
    tape = Tape(items={0: Item(0, "mul", "mlp", bytes=2_000_000, seconds=0.003, saved_bytes=2_000_000)})
    blocks = [BlockCosts(tape, 0, 0.0, 0.0, 0.0) for _ in range(6)]
    again, kept = {0: Way.RECOMPUTE}, {0: Way.KEEP}
    plan = MemoryPlan((again, again, again, kept, again, again), 0.0, 0.0, 0.0)
    names = [f"encoder.{number}" for number in range(5)] + ["decoder.0"]
    assert decisions(names, blocks, plan) == [
        "encoder.0-2, 4 (4 blocks): mlp mul, 2.00 MB: recompute; costs 3.00 ms",
        "encoder.3: mlp mul, 2.00 MB: keep; would cost 3.00 ms to make again",
        "decoder.0: mlp mul, 2.00 MB: recompute; costs 3.00 ms",
    ]
