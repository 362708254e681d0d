"""Block-sparse attention against torch's, forward and backward, interleaved in one process.

    python benchmarks/bench_sparse_attention.py [--tokens 2048 4096 8192] [--heads 4] [--block 64] [--share 8]
        [--rounds 5] [--rows] [--json FOLDER]

For each length, causal and full attention on one example, with heads of width 64 in float32. One in `share` of the
blocks of plain attention is kept at random, including the diagonal. `--rows` also times attention over single pairs at
the same density. `held` is the memory that autograd saves plus the gradients; `peak` is the peak of live tensors, by
torch's allocator events.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.kernels.sparse_attention.block_grid import NONE, BlockGrid, blocks_of, encode_blocks
from thrifty.kernels.sparse_attention.row_attention import row_attention
from thrifty.kernels.sparse_attention.visibility import VisibilityRule

WIDTH = 64


def grid_with(tokens: int, block: int, share: int, causal: bool) -> BlockGrid:
    """Keep one visible block in `share`, rounded to the nearest, for each block of queries, including its own."""
    side, generator = blocks_of(tokens, block), torch.Generator().manual_seed(0)
    kept = torch.eye(side, dtype=torch.bool)
    for row in range(side):
        visible = row + 1 if causal else side
        others = [column for column in range(visible) if column != row]
        more = max(round(visible / share) - 1, 0)
        for index in torch.randperm(len(others), generator=generator)[:more].tolist():
            kept[row, others[index]] = True
    codes = encode_blocks(kept[None, None], VisibilityRule(causal), block)
    return BlockGrid(codes, block, int((codes != NONE).sum()), VisibilityRule(causal))


def keys_with(tokens: int, share: int, causal: bool) -> Tensor:
    """Return the same density for single keys, (1, 1, t, t / share)."""
    ranked = torch.rand(1, 1, tokens, tokens, generator=torch.Generator().manual_seed(0))
    if causal:
        ranked = ranked.tril()
    best = ranked.topk(tokens // share, dim=-1)
    visible = torch.arange(tokens)[:, None] + 1 if causal else tokens
    keep = torch.arange(tokens // share) < -(-visible // share) if causal else torch.ones(1, tokens // share).bool()
    return torch.where(keep & (best.values > 0), best.indices, -1)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of live tensors during some work, beyond those before it."""
    now = most = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    for event in sorted(
        (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


def saved_bytes(core: Callable[..., Tensor], qkv: list[Tensor]) -> int:
    """Return the bytes of the distinct storages that autograd saves for the backward pass."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        core(*qkv)
    return sum(storages.values())


def mask_of(grid: BlockGrid, tokens: int) -> Tensor:
    """Return the pairs that a grid keeps, (1, 1, t, t)."""
    blocks = (grid.codes != NONE).repeat_interleave(grid.block, -1).repeat_interleave(grid.block, -2)
    position = torch.arange(tokens)
    return blocks[..., :tokens, :tokens] & grid.sight.visible(position[:, None], position)


def compare(tokens: int, causal: bool, options: argparse.Namespace) -> None:
    qkv = [torch.randn(1, options.heads, tokens, WIDTH).requires_grad_() for _ in range(3)]
    upstream = torch.randn_like(qkv[0])
    grid = grid_with(tokens, options.block, options.share, causal)
    side = blocks_of(tokens, options.block)
    density = grid.count / (side * (side + 1) / 2 if causal else side * side)
    cores: dict[str, Callable[..., Tensor]] = {
        "torch": partial(F.scaled_dot_product_attention, is_causal=causal),
        "torch, under a mask": partial(F.scaled_dot_product_attention, attn_mask=mask_of(grid, tokens)),
        "blocks": partial(block_attention, grid=grid),
    }
    if options.rows:
        cores["rows"] = partial(row_attention, keys=keys_with(tokens, options.share, causal))

    def both(core: Callable[..., Tensor]) -> None:
        torch.autograd.grad(core(*qkv), qkv, upstream)

    ways = {name: partial(both, core) for name, core in cores.items()}
    timings = side_by_side(ways, options.rounds, warmup=1)
    kind = "causal" if causal else "full"
    print_timings(f"{kind} attention, {tokens} tokens, density {density:.3f}, forward and backward", timings, "torch")
    sizes = {name: {"held": saved_bytes(cores[name], qkv), "peak": peak_bytes(ways[name])} for name in cores}
    for name, size in sizes.items():
        print(f"  {name:<34} {size['held'] / 1e6:9.1f} MB saved   {size['peak'] / 1e6:9.1f} MB peak")
    if options.json:
        facts = {"benchmark": "sparse attention", "tokens": tokens, "causal": causal, "density": density}
        facts |= {"heads": options.heads, "block": options.block, "bytes": sizes}
        save_timings(
            options.json / f"sparse-attention-{tokens}-{'causal' if causal else 'all'}.json", facts, timings, "torch"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--share", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--json", type=Path, help="folder for one file per case")
    options = parser.parse_args()
    for tokens in options.tokens:
        for causal in (True, False):
            compare(tokens, causal, options)


if __name__ == "__main__":
    main()
