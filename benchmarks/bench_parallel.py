"""Steps on several ranks against hand-written PyTorch doing the same on the same ranks, step by step in turn.

Promise: step time at most 1.03 times that of DistributedDataParallel or FSDP2 by hand. Each pair uses the same model,
rows, loss and optimizer, and both say the loss and the gradient's norm of the whole batch at every step.

    python benchmarks/bench_parallel.py [results/benchmarks/parallel-cpu.json]
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from side_by_side import Timing, rows, side_by_side, tell, write
from thrifty.core import mesh
from thrifty.core.batches import BatchSource
from thrifty.core.compose import Plain, compose
from thrifty.core.objective import Prediction
from thrifty.core.recipe import DataSettings, ModelSettings
from thrifty.core.technique import Technique
from thrifty.data import open_data
from thrifty.models import build_model
from thrifty.objectives import find_objective
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.parallelism.replicate import Replicate
from thrifty.techniques.parallelism.shard import Shard
from thrifty.training.loop import train

RANKS, STEPS, ROUNDS = 2, 100_000, 40
DATA = DataSettings(length=256, batch=8, vocabulary=4096)
PRESETS = ("llama-nano", "llama-micro")


@dataclass(frozen=True)
class Pair:
    divides: Technique
    axes: Mapping[str, int]
    by_hand: Callable[[nn.Module], nn.Module]
    """The plain model divided by torch alone."""


def in_blocks(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=False)


PAIRS = {
    "DDP": Pair(Replicate(), {"replicate": RANKS}, DistributedDataParallel),
    "FSDP2": Pair(Shard(), {"shard": RANKS}, in_blocks),
}


def by_hand(plain: Plain, model: nn.Module) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    head = getattr(model, "module", model).head
    own, first = plain.source.batch // RANKS, dist.get_rank() * plain.source.batch // RANKS
    for step in range(STEPS):
        batch = plain.source.rows(step, first, first + own)
        hidden = model(batch["tokens"][:, :-1])
        losses = plain.objective.losses(Prediction(hidden=hidden, head=head), batch)
        loss = (losses * batch.weight).sum()
        (loss * RANKS).backward()  # torch divides the sum of gradients by the ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        total = loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item() + _whole(norm).item()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def timed(pair: Pair, plain: Plain) -> dict[str, Timing]:
    mesh.lay({name: pair.axes.get(name, 1) for name in mesh.AXES}, "cpu")
    run = compose(plain, [AdamW(lr=1e-3), pair.divides], STEPS)
    ours, theirs = train(run, run.start(), seed=0), by_hand(plain, pair.by_hand(plain.build()))
    found = side_by_side({"by hand": lambda: next(theirs), "thrifty": lambda: next(ours)}, ROUNDS, 5)
    ours.close()
    mesh.lift()
    return found


def on_one_rank(rank: int, folder: str, kept: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    data = open_data(DATA, seed=0)
    source: BatchSource = data.train
    found = {}
    for preset in PRESETS:
        plain = Plain(
            lambda preset=preset: build_model(ModelSettings(preset=preset), data.vocabulary, DATA.length, 0),
            source,
            find_objective("next_token"),
        )
        for name, pair in PAIRS.items():
            timings = timed(pair, plain)
            found[f"{preset}, {name}"] = rows(timings, "by hand")
            if rank == 0:
                tell(
                    f"{name}: one step of {preset}, 8 x 256 tokens, {RANKS} ranks", timings, "by hand", 2048, "tokens/s"
                )
    if rank == 0 and kept:
        write(Path(kept[0]), {"benchmark": "parallel", "ranks": RANKS, "baseline": "by hand", "seconds": found})
    dist.destroy_process_group()


if __name__ == "__main__":
    open_data(DATA, seed=0)  # prepared once, before the ranks open it
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(on_one_rank, (folder, sys.argv[1:]), RANKS, start_method="spawn")
