"""Activations quantized to 8, 4 and 2 bits: speed against copying, and steps of a 12-block model.

    python benchmarks/bench_compress_activations.py [--width 512 --length 256 --batch 8] [--json PATH]

Aim: quantizing and dequantizing reach half the byte rate of a copy or more, and with 4 bits a step takes at most 1.3
times as long (1.15 on a GPU). On the CPU of the saved results, steps and float32 meet it, except that 8 bits just miss
it. bfloat16, of which a copy moves half the bytes in half the time, reaches a quarter to half of the rate. Bytes are
live activations at the end of the forward pass, counted on the step itself.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from side_by_side import print_timings, ratio, rows, side_by_side, write
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.step_footprint import CountedPasses
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.tasks.language_task import BYTES, source_text
from thrifty.kernels.quantized_tensors import QuantizedTensor, quantize_tensor
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory.compress_activations import CompressActivations
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.memory_meter import keep_freed_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = (8, 4, 2)


def race_kernels(numbers: int) -> dict[str, object]:
    """Time both directions against copies of the same tensor.

    Quantizing is compared with a copy into existing memory; dequantizing, which allocates a tensor, with a copy into
    new memory.
    """
    facts: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(numbers, device=DEVICE).to(dtype)
        target = torch.empty_like(tensor)
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda tensor=tensor, target=target: target.copy_(tensor),
            "copy, new memory": tensor.clone,
        }
        for bits in BITS:
            ways[f"encode, {bits} bits"] = lambda bits=bits, tensor=tensor: quantize_tensor(tensor, bits, 1)
            ways[f"decode, {bits} bits"] = _quantized(tensor, bits).decode
        timings = side_by_side(ways, rounds=20, warmup=3)
        name, size = str(dtype).removeprefix("torch."), tensor.element_size()
        print_timings(f"{numbers:,} elements in {name}", timings, "copy", numbers, "elements/s")
        shares = {}
        for way in list(ways)[2:]:
            copy = "copy" if way.startswith("encode") else "copy, new memory"
            moved = size + (int(way.split()[1]) + 1 / 8) / 8
            shares[way] = moved / (2 * size) / ratio(timings, way, copy)
        text = ", ".join(f"{way} {share:.2f}" for way, share in shares.items())
        print(f"  bytes per second relative to the copy: {text}")
        facts[name] = {"seconds": rows(timings, "copy"), "share of copy bandwidth": shares}
    return facts


def _quantized(tensor: Tensor, bits: int) -> QuantizedTensor:
    quantized = quantize_tensor(tensor, bits, 1)
    assert quantized is not None
    return quantized


def composed(arguments: argparse.Namespace, *chosen: Technique) -> Run:
    def build() -> torch.nn.Module:
        heads = arguments.width // 64
        shape = ModelConfig(
            "gpt", 12, arguments.width, heads, heads, 4 * arguments.width, BYTES, arguments.length, True
        )
        model = assemble(shape)
        initialize(model, 0)
        return model

    source = PackedTokens(source_text()[0], arguments.length, arguments.batch, 0)
    return compose(BaseRun(build, source, NextToken()), (*chosen, AdamW(lr=1e-4)), 1000, DEVICE)


def race_steps(arguments: argparse.Namespace) -> dict[str, object]:
    runs = {
        "plain": composed(arguments),
        **{f"{bits} bits": composed(arguments, CompressActivations(bits=bits)) for bits in BITS},
        "4 bits, a range a head": composed(arguments, CompressActivations(group=64, ranges="head")),
        "recompute": composed(arguments, Recompute()),
    }
    model = runs["plain"].build_model()
    recomputing = runs["recompute"].build_model()
    batch = runs["plain"].source.at(0).to(DEVICE)
    steps, saved = {}, {}
    for name, run in runs.items():
        own = recomputing if name == "recompute" else model
        saved[name] = CountedPasses(own, run.objective, run.backward, batch).activations

        def step(run: Run = run, own: torch.nn.Module = own) -> None:
            own.zero_grad()
            run.backward(own, run.objective, batch)

        steps[name] = step
    timings = side_by_side(steps, rounds=arguments.rounds, warmup=2)
    print_timings(
        f"12 blocks of width {arguments.width}, {arguments.batch} x {arguments.length} tokens", timings, "plain"
    )
    for name, size in saved.items():
        print(f"  {name:<34} {size / 1e6:9.1f} MB of activations, {size / saved['plain']:.3f} of plain")
    return {"seconds": rows(timings, "plain"), "bytes": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--numbers", type=int, default=2**25)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with keep_freed_memory(DEVICE):  # as in a run
        facts = {"kernels": race_kernels(arguments.numbers), "steps": race_steps(arguments)}
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("width", "length", "batch", "numbers")}
        write(arguments.json, {"benchmark": "compress_activations", "settings": settings, **facts})


if __name__ == "__main__":
    main()
