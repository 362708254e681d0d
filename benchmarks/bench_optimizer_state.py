"""Optimizer steps with 8-bit and bfloat16 moments against float32, on a 30M-parameter model.

Promise: slightly more than a quarter of float32's state (int8), or half of it (bfloat16). Steps are at least five times
as fast as those of torchao and bitsandbytes, if installed. This held on one machine, and 2.7 times on another
(`results/benchmarks/optimizer-state-cpu.json`). Against torch's fused kernel, which is bound by memory, rounding costs
CPU time; the table shows the amount.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bench_adamw import model, torch_adamw
from side_by_side import print_timings, save_timings, side_by_side
from thrifty.core.gradient_transform import GradientTransform
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.precision.optimizer_state import Bfloat16Format, Int8Format, with_compact_state


def chained(transform: GradientTransform) -> TransformOptimizer:
    return TransformOptimizer(model().named_parameters(), transform)


def state_bytes(optimizer: TransformOptimizer) -> int:
    return sum(tensor.nbytes for tensors in optimizer.slots.values() for tensor in tensors)


def others() -> dict[str, Callable[[], object]]:
    """Return other installed 8-bit AdamWs; torchao compiles its own."""
    optimizers: dict[str, Callable[[], object]] = {}
    for package, module in (("torchao", "torchao.optim"), ("bitsandbytes", "bitsandbytes.optim")):
        if importlib.util.find_spec(package):
            optimizer = importlib.import_module(module).AdamW8bit(model().parameters(), lr=1e-3, betas=(0.9, 0.95))
            optimizers[f"{package} AdamW8bit"] = optimizer.step
    return optimizers


def main() -> None:
    torch.manual_seed(0)
    optimizers = {
        "float32, torch fused": torch_adamw(model(), fused=True),
        "int8": (eight := chained(with_compact_state(adamw(1e-3), Int8Format))),
        "bfloat16": (sixteen := chained(with_compact_state(adamw(1e-3), Bfloat16Format))),
        "lion, float32": chained(lion(1e-4)),
        "lion, int8": chained(with_compact_state(lion(1e-4), Int8Format)),
    }
    steps: dict[str, Callable[[], object]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    timings = side_by_side(steps | others(), rounds=12, warmup=2)
    parameters = sum(parameter.numel() for parameter in eight.parameters)
    print_timings(f"AdamW on {parameters:,} parameters", timings, "float32, torch fused", parameters, "parameters/s")
    each = {"int8": state_bytes(eight) / parameters, "bfloat16": state_bytes(sixteen) / parameters}
    print("  bytes of state per parameter:", ", ".join(f"{name} {count:.3f}" for name, count in each.items()))
    if len(sys.argv) > 1:
        facts = {"benchmark": "optimizer_state", "parameters": parameters, "bytes per parameter": each}
        save_timings(Path(sys.argv[1]), facts, timings, "float32, torch fused")


if __name__ == "__main__":
    main()
