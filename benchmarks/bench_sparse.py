"""Sparse products against torch's dense ones, torch.sparse and scipy: layer products by density, and a training step.

    python benchmarks/bench_sparse.py [--shape 2048,1024,4096] [--densities 0.5 0.1] [--rounds 3] [--json FOLDER]

A shape is tokens, inputs, outputs. `forward` is x Wᵀ; `backward` is the gradients of x and of W at kept entries. The
first table has random single weights, the second blocks of 16, 32 and 64. The step is forward, backward and SGD of a
residual feed-forward block of this shape with two masked matrices. SpGEMM multiplies two square matrices. scipy uses
one thread.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side import Timing, print_timings, rows, side_by_side, write
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix
from thrifty.kernels.sparse.csr_matrix import CsrMatrix
from thrifty.kernels.sparse.sparse_linear import sparse_linear
from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern
from thrifty.kernels.sparse.spgemm import spgemm_outer, spgemm_rows

DENSE = "dense, torch"
Variants = dict[str, Callable[[], object]]


def random_mask(outputs: int, inputs: int, density: float, block: int = 1) -> Tensor:
    grid = torch.rand(outputs // block, inputs // block) < density
    return grid.repeat_interleave(block, 0).repeat_interleave(block, 1)


def ours(x: Tensor, upstream: Tensor, weight: Tensor, pattern: SparsityPattern) -> tuple[Callable, Callable]:
    def forward() -> None:
        pattern.spmm(x, pattern.pick(weight))

    def backward() -> None:
        pattern.spmm_turned(upstream, pattern.turn(pattern.pick(weight)))
        pattern.place(pattern.sddmm(upstream, x))

    return forward, backward


def by_torch(x: Tensor, upstream: Tensor, weight: Tensor, layout: Callable[[Tensor], Tensor]) -> Variants:
    """Return the products by torch.sparse, which computes S times columns, so inputs and results are transposed
    views."""
    matrix, turned = layout(weight), layout(weight.T.contiguous())
    products: Variants = {"forward": lambda: matrix @ x.T, "of x": lambda: turned @ upstream.T}
    if matrix.layout is torch.sparse_csr:
        zeros = torch.sparse_csr_tensor(
            matrix.crow_indices(), matrix.col_indices(), torch.zeros_like(matrix.values()), matrix.shape
        )
        products["of W"] = lambda: torch.sparse.sampled_addmm(zeros, upstream.T, x, beta=0.0)
    return products


def by_scipy(x: Tensor, upstream: Tensor, weight: Tensor) -> Variants:
    matrix = scipy.sparse.csr_array(weight.numpy())
    turned, columns, up = matrix.T.tocsr(), np.ascontiguousarray(x.numpy().T), np.ascontiguousarray(upstream.numpy().T)
    return {"forward": lambda: matrix @ columns, "of x": lambda: turned @ up}


def time_layer(shape: tuple[int, int, int], density: float, block: int, rounds: int) -> dict[str, dict[str, Timing]]:
    """Time forward and backward of every variant."""
    tokens, inputs, outputs = shape
    x, upstream = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    mask = random_mask(outputs, inputs, density, block)
    weight = torch.randn(outputs, inputs) * mask
    forward: Variants = {DENSE: lambda: F.linear(x, weight)}
    backward: Variants = {DENSE: lambda: (upstream @ weight, upstream.T @ x)}
    name = "csr" if block == 1 else f"blocks of {block}"
    forward[name], backward[name] = ours(
        x, upstream, weight, CsrMatrix.of(mask) if block == 1 else BlockSparseMatrix.of(mask)
    )
    if block == 1:
        theirs = {"torch.sparse csr": by_torch(x, upstream, weight, Tensor.to_sparse_csr)}
        if density <= 0.1:  # it takes seconds at higher densities
            theirs["scipy csr, forward and of x"] = by_scipy(x, upstream, weight)
    else:
        layout = partial(Tensor.to_sparse_bsr, blocksize=(block, block))
        theirs = {f"torch.sparse bsr {block}, forward and of x": by_torch(x, upstream, weight, layout)}
        if block > 16:  # no compiled kernel supports these block sizes
            name = "gather and bmm"
            forward[name], backward[name] = ours(x, upstream, weight, BlockSparseMatrix.of(mask, block))
    for name, products in theirs.items():
        forward[name] = products["forward"]
        backward[name] = lambda products=products: [
            product() for part, product in products.items() if part != "forward"
        ]
    return {"forward": side_by_side(forward, rounds, 1), "backward": side_by_side(backward, rounds, 1)}


def compare_layers(shape: tuple[int, int, int], densities: list[float], rounds: int, block: int) -> list[dict]:
    results = []
    for density in densities:
        for direction, timings in time_layer(shape, density, block, rounds).items():
            kind = "single weights" if block == 1 else f"blocks of {block}"
            flops = 2 * shape[0] * shape[1] * shape[2] * density * (1 if direction == "forward" else 2)
            print_timings(
                f"{direction}, {kind}, density {density:g}", timings, DENSE, flops / 1e9, "GFLOP/s of kept weights"
            )
            results.append({"kept": kind, "density": density, "direction": direction, "seconds": rows(timings, DENSE)})
    return results


class FeedForward(nn.Module):
    """Module x + W₂ gelu(W₁ x) with masked weights, and dense products or products by these patterns."""

    def __init__(self, masks: list[Tensor], patterns: list[SparsityPattern] | None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            torch.randn(mask.shape, generator=generator) * mask / mask.shape[1] ** 0.5 for mask in masks
        )
        self.masks, self.patterns = masks, patterns

    def product(self, number: int, x: Tensor) -> Tensor:
        weight = self.weights[number]
        return F.linear(x, weight) if self.patterns is None else sparse_linear(x, weight, None, self.patterns[number])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.product(1, F.gelu(self.product(0, x)))

    def step(self, x: Tensor) -> None:
        self(x).square().mean().backward()
        with torch.no_grad():
            for weight, mask in zip(self.weights, self.masks, strict=True):
                assert weight.grad is not None
                weight -= 0.01 * weight.grad * mask
                weight.grad = None


def compare_steps(shape: tuple[int, int, int], density: float, rounds: int) -> dict[str, Timing]:
    tokens, inputs, outputs = shape
    x = torch.randn(tokens, inputs, requires_grad=True)
    variants: Variants = {}
    for block in (1, 16, 32, 64):
        masks = [random_mask(*pair, density, block) for pair in ((outputs, inputs), (inputs, outputs))]
        if block == 1:
            variants["masked, dense products"] = partial(FeedForward(masks, None).step, x)
        patterns: list[SparsityPattern] = [
            CsrMatrix.of(mask) if block == 1 else BlockSparseMatrix.of(mask) for mask in masks
        ]
        variants["csr" if block == 1 else f"blocks of {block}"] = partial(FeedForward(masks, patterns).step, x)
    return side_by_side(variants, rounds, 1)


def compare_spgemm(size: int, density: float, rounds: int) -> dict[str, Timing]:
    a, b = ((torch.randn(size, size) * random_mask(size, size, density)).to_sparse_csr() for _ in range(2))
    theirs = [scipy.sparse.csr_array(matrix.to_dense().numpy()) for matrix in (a, b)]
    variants: Variants = {
        "torch.sparse": lambda: a @ b,
        "by rows": lambda: spgemm_rows(a, b),
        "by outer products": lambda: spgemm_outer(a, b),
        "scipy": lambda: theirs[0] @ theirs[1],
    }
    return side_by_side(variants, rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048,1024,4096")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.5, 0.2, 0.1, 0.05, 0.02, 0.005])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="folder for the results")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokens, inputs, outputs = map(int, options.shape.split(","))
    shape = (tokens, inputs, outputs)
    layers = [
        row for block in (1, 16, 32, 64) for row in compare_layers(shape, options.densities, options.rounds, block)
    ]
    steps = compare_steps(shape, 0.1, 2 * options.rounds)
    print_timings("step of a feed-forward block at density 0.1", steps, "masked, dense products")
    squares: Mapping[float, dict[str, Timing]] = {
        density: compare_spgemm(inputs * 2, density, options.rounds) for density in (0.02, 0.005)
    }
    for density, timings in squares.items():
        print_timings(f"SpGEMM, {inputs * 2} x {inputs * 2}, density {density:g}", timings, "torch.sparse")
    if options.json:
        facts = {
            "benchmark": "sparse",
            "shape": options.shape,
            "threads": torch.get_num_threads(),
            "layers": layers,
            "step": rows(steps, "masked, dense products"),
            "spgemm": {density: rows(timings, "torch.sparse") for density, timings in squares.items()},
        }
        write(options.json / "sparse-cpu.json", facts)


if __name__ == "__main__":
    main()
