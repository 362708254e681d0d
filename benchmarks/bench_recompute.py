"""Optimal against periodic recomputation: a step of a deep model at equal memory.

    python benchmarks/bench_recompute.py [--depth 16] [--width 128] [--length 128] [--batch 8] [--json FILE]

Promise: at the peak of any periodic schedule the optimal one is no slower. Bytes are live tensors without parameters
and their gradients: `after` is the end of the forward pass, `peak` the maximum of a step.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from side_by_side import print_timings, ratio, save_timings, side_by_side
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.planner.chain_schedule import periodic_schedule
from thrifty.memory.recompute_schedule import RecomputeSchedule
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.techniques.memory.optimal_recompute import OptimalRecompute
from thrifty.techniques.memory.recompute import Recompute

PLAIN, VOCABULARY = "nothing", 256
SHARES = (0.75, 0.5, 0.25)


def in_segments(every: int) -> Callable[[nn.Module], object]:
    def change(model: nn.Module) -> object:
        return BlockChain(list(model.blocks), RecomputeSchedule.of(periodic_schedule(len(model.blocks), every)))  # type: ignore

    return change


def ways(depth: int) -> dict[str, Callable[[nn.Module], object]]:
    techniques: dict[str, Callable[[nn.Module], object]] = {
        PLAIN: lambda model: None,
        "every block": Recompute().model,
        "every other block": Recompute(every=2).model,
        "sqrt": Recompute(schedule="sqrt").model,
        "selective": Recompute(schedule="selective").model,
    }
    techniques |= {f"segments of {every}": in_segments(every) for every in (1, 2, depth // 4, depth // 2)}
    return techniques | {f"optimal, {share:.0%}": OptimalRecompute(bytes=share).model for share in SHARES}


def step_of(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    def step() -> None:
        model(tokens).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def live_bytes(model: nn.Module, tokens: Tensor) -> tuple[int, int]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with gc_disabled(), StepTrace(*model.parameters(), *model.buffers(), *gradients, tokens) as live:
        loss = model(tokens).square().mean()
        after = live.now
        loss.backward()
    model.zero_grad()
    return after, live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("depth", 16), ("width", 128), ("length", 128), ("batch", 8), ("rounds", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = torch.randint(0, VOCABULARY, (options.batch, options.length))

    def build(change: Callable[[nn.Module], object]) -> nn.Module:
        shape = ModelConfig(
            "gpt", options.depth, options.width, 4, 4, 4 * options.width, VOCABULARY, options.length, True
        )
        model = assemble(shape)
        initialize(model, 0)
        change(model.train())
        return model

    models = {name: build(change) for name, change in ways(options.depth).items()}
    sizes = {name: live_bytes(model, tokens) for name, model in models.items()}
    for name, (_, peak) in list(sizes.items()):
        if name.startswith("segments"):
            name = f"optimal in what {name} need"
            models[name] = build(OptimalRecompute(bytes=int(1.02 * peak)).model)
            sizes[name] = live_bytes(models[name], tokens)
    timings = side_by_side({name: step_of(model, tokens) for name, model in models.items()}, options.rounds)
    title = f"{options.depth} blocks of width {options.width}, {options.batch} x {options.length} tokens"
    print_timings(title, timings, PLAIN)
    for name, (after, peak) in sorted(sizes.items(), key=lambda pair: -pair[1][1]):
        slowdown = ratio(timings, name, PLAIN)
        print(f"  {name:<36} after {after / 1e6:8.1f} MB   peak {peak / 1e6:8.1f} MB   {slowdown:6.3f} of {PLAIN}")
    if options.json:
        facts = {"benchmark": "recompute", "shape": vars(options) | {"json": None}, "bytes after, at peak": sizes}
        save_timings(options.json, facts, timings, PLAIN)


if __name__ == "__main__":
    main()
