"""Tiled causal attention against torch's: forward and backward, interleaved in one process.

    python benchmarks/bench_attention.py [--shapes 8,6,6,512,64] [--tiles 64 128 256] [--rounds 9] [--json FOLDER]

A shape is batch, heads, key-value heads, tokens, head width. `kept` is the memory that autograd saves for the backward
pass. The first call, which compiles unless cached, is reported separately.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.kernels.tiled_attention import causal_attention_reference, tiled_attention


def contenders(tiles: list[int]) -> dict[str, Callable[..., Tensor]]:
    compiled = torch.compile(tiled_attention, dynamic=False)
    chosen = {"torch": causal_attention_reference, "tiled, eager": tiled_attention, "tile chosen": compiled}
    return chosen | {f"tile {tile}": partial(compiled, tile=tile) for tile in tiles}


def inputs(b: int, h: int, g: int, t: int, k: int) -> list[Tensor]:
    return [torch.randn(b, heads, t, k).bfloat16().requires_grad_() for heads in (h, g, g)]


def kept_bytes(core: Callable[..., Tensor], qkv: list[Tensor]) -> int:
    """Return the bytes of the distinct storages that autograd saves for the backward pass."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        core(*qkv)
    return sum(storages.values())


def compare(shape: str, tiles: list[int], rounds: int, folder: Path | None) -> None:
    torch.compiler.reset()
    qkv = inputs(*map(int, shape.split(",")))
    upstream = torch.randn_like(qkv[0])
    cores = contenders([tile for tile in tiles if tile <= upstream.shape[2]])
    first: dict[str, float] = {}

    def both(core: Callable[..., Tensor]) -> None:
        torch.autograd.grad(core(*qkv), qkv, upstream)

    for name, core in cores.items():
        began = time.perf_counter()
        both(core)
        first[name] = time.perf_counter() - began
    timings = side_by_side({name: partial(both, core) for name, core in cores.items()}, rounds)
    print_timings(f"causal attention {shape}, forward and backward, bfloat16", timings, "torch")
    kept = {name: kept_bytes(core, qkv) for name, core in cores.items()}
    for name in cores:
        print(f"  {name:<34} {kept[name] / 1e6:9.1f} MB saved   first call {first[name]:.1f} s")
    if folder:
        facts = {"benchmark": "attention", "shape": shape, "kept_bytes": kept, "first_call": first}
        save_timings(folder / f"attention-{shape.replace(',', '-')}.json", facts, timings, "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8,6,6,512,64", "8,6,2,512,64", "4,6,6,1024,64"])
    parser.add_argument("--tiles", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="folder for one file per shape")
    options = parser.parse_args()
    for shape in options.shapes:
        compare(shape, options.tiles, options.rounds, options.json)


if __name__ == "__main__":
    main()
