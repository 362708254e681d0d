"""Linear layers in float8 against bfloat16: forward and backward, interleaved in one process.

    python benchmarks/bench_float8.py [--shapes 4096,1024,4096] [--rounds 9] [--json FOLDER]

A shape is tokens, inputs, outputs. On a GPU with float8 units, products use them and casts are compiled. On other
devices they are emulated: the values are those of float8, but the step is slower than plain. torchao is included if it
is installed.
"""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.kernels.float8 import has_units
from thrifty.kernels.float8_linear import CastRule, DelayedScaling, float8_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BASELINE = "bfloat16, torch"


def contenders(weight: nn.Parameter) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return layers with one weight, as functions of their input, by name."""
    casting = CastRule(emulated=not has_units(DEVICE))
    delayed = DelayedScaling(torch.full((3,), 64.0, device=DEVICE), torch.zeros(3, device=DEVICE))
    ways: dict[str, Callable[[Tensor], Tensor]] = {BASELINE: lambda x: nn.functional.linear(x, weight)}
    for name, chosen, scales in (
        ("delayed scales", casting, delayed),
        ("current scales", casting, None),
        ("a scale for each row", replace(casting, rows=True), None),
    ):
        ways[name] = partial(float8_linear, weight=weight, bias=None, casting=chosen, delayed=scales)
    if importlib.util.find_spec("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        layer = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        layer.weight = weight
        config = Float8LinearConfig(emulate=casting.emulated)
        ways["current scales, torchao"] = convert_to_float8_training(nn.Sequential(layer), config=config)
    # without a GPU, compiling gains nothing compared with the emulation
    return ways if casting.emulated else {name: torch.compile(way, dynamic=False) for name, way in ways.items()}


def compare(shape: str, rounds: int, folder: Path | None) -> None:
    tokens, inputs, outputs = map(int, shape.split(","))
    x = torch.randn(tokens, inputs, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5)
    upstream = torch.randn(tokens, outputs, device=DEVICE, dtype=torch.bfloat16)

    def both(way: Callable[[Tensor], Tensor]) -> None:
        torch.autograd.grad(way(x), (x, weight), upstream)

    timings = side_by_side({name: partial(both, way) for name, way in contenders(weight).items()}, rounds)
    flops = 6 * tokens * inputs * outputs
    print_timings(
        f"linear layer {shape}, forward and backward, on {DEVICE.type}", timings, BASELINE, flops / 1e9, "GFLOP/s"
    )
    if folder:
        facts = {"benchmark": "float8", "shape": shape, "on units": has_units(DEVICE)}
        save_timings(folder / f"float8-{shape.replace(',', '-')}.json", facts, timings, BASELINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["4096,1024,4096", "8192,4096,4096"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="folder for one file per shape")
    options = parser.parse_args()
    for shape in options.shapes:
        compare(shape, options.rounds, options.json)


if __name__ == "__main__":
    main()
