"""Steps on several ranks against hand-written PyTorch on the same ranks, in alternating steps.

Promise: step time at most 1.03 times that of DistributedDataParallel, FSDP2 or tensor parallelism by hand. Each pair
uses the same model, rows, loss and optimizer. Both compute the loss and the gradient norm of the whole batch at every
step.

    python benchmarks/bench_parallel.py [results/benchmarks/parallel-cpu.json]
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import llama_by_hand
from side_by_side import Timing, print_timings, rows, side_by_side, write
from thrifty.composition.compose import BaseRun, compose
from thrifty.core import mesh
from thrifty.core.batches import BatchSource
from thrifty.core.objective import Prediction
from thrifty.core.recipe import DataSettings, ModelSettings
from thrifty.core.technique import Technique
from thrifty.data.text.text_data import open_text
from thrifty.models import build_model
from thrifty.models.model_presets import shape_of
from thrifty.objectives import find_objective
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.parallelism.replicate import ReplicatedDataParallel
from thrifty.techniques.parallelism.shard import ShardedDataParallel
from thrifty.techniques.parallelism.tensor import TensorParallel
from thrifty.training.loop import train

RANKS, STEPS, ROUNDS = 2, 100_000, 40
DATA = DataSettings("python-stdlib", length=256, batch=8, vocabulary=4096)
PRESETS = ("llama-nano", "llama-micro")


@dataclass(frozen=True)
class Pair:
    divides: Technique
    axis: str
    by_hand: Callable[[BaseRun, ModelSettings], Iterator[float]]
    """Steps of the plain model, parallelized with torch alone."""
    tied: bool | None = None
    """True if the head shares the embedding's weights; by default that of the preset."""


def with_ddp(plain: BaseRun, settings: ModelSettings) -> Iterator[float]:
    return on_own_rows(plain, DistributedDataParallel(plain.build()))


def with_fsdp2(plain: BaseRun, settings: ModelSettings) -> Iterator[float]:
    model = plain.build()
    for block in model.blocks:
        fully_shard(block)
    return on_own_rows(plain, fully_shard(model, reshard_after_forward=False))


def on_own_rows(plain: BaseRun, model: nn.Module) -> Iterator[float]:
    optimizer, head = adamw(model), getattr(model, "module", model).head
    own, first = plain.source.batch // RANKS, dist.get_rank() * plain.source.batch // RANKS
    for step in range(STEPS):
        batch = plain.source.rows(step, first, first + own)
        hidden = model(batch["tokens"][:, :-1])
        losses = plain.objective.losses(Prediction(hidden=hidden, head=head), batch)
        loss = (losses * batch.weight).sum()
        (loss * RANKS).backward()  # torch divides the sum of gradients by the number of ranks
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        total = loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        yield total.item() + _whole(norm).item()


def with_tensor_parallel(plain: BaseRun, settings: ModelSettings) -> Iterator[float]:
    tokens = plain.source.at(0)["tokens"]
    vocabulary = plain.build().head.out_features
    shape = shape_of(settings, vocabulary, tokens.shape[1] - 1)
    model = llama_by_hand.divided(llama_by_hand.Llama(shape), init_device_mesh("cpu", (RANKS,)))
    optimizer = adamw(model)
    for step in range(STEPS):
        loss = llama_by_hand.backward(model, plain.source.at(step)["tokens"])
        norm = llama_by_hand.whole_norm(model)
        optimizer.step()
        optimizer.zero_grad()
        yield _whole(loss).item() + norm.item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    plain, divided = [], []
    for parameter in model.parameters():
        (divided if isinstance(parameter, DTensor) else plain).append(parameter)
    # each group must contain one kind of tensor
    groups = [{"params": parameters} for parameters in (plain, divided) if parameters]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


PAIRS = {
    "DDP": Pair(ReplicatedDataParallel(), "replicate", with_ddp),
    "FSDP2": Pair(ShardedDataParallel(), "shard", with_fsdp2),
    "tensor": Pair(TensorParallel(), "tensor", with_tensor_parallel, tied=False),
}


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def timed(pair: Pair, plain: BaseRun, settings: ModelSettings) -> dict[str, Timing]:
    mesh.set_mesh({name: RANKS if name == pair.axis else 1 for name in mesh.AXES}, "cpu")
    run = compose(plain, [AdamW(lr=1e-3), pair.divides], STEPS)
    ours, theirs = train(run, run.start(), seed=0), pair.by_hand(plain, settings)
    timings = side_by_side({"by hand": lambda: next(theirs), "thrifty": lambda: next(ours)}, ROUNDS, 5)
    ours.close()
    mesh.clear_mesh()
    return timings


def on_one_rank(rank: int, folder: str, paths: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    data = open_text(DATA, seed=0)
    source: BatchSource = data.train
    results = {}
    for preset in PRESETS:
        for name, pair in PAIRS.items():
            settings = ModelSettings(preset=preset, tied=pair.tied)

            def build(settings: ModelSettings = settings) -> nn.Module:
                return build_model(settings, data.vocabulary, DATA.length, 0)

            timings = timed(pair, BaseRun(build, source, find_objective("next_token")), settings)
            results[f"{preset}, {name}"] = rows(timings, "by hand")
            if rank == 0:
                print_timings(
                    f"{name}: one step of {preset}, 8 x 256 tokens, {RANKS} ranks", timings, "by hand", 2048, "tokens/s"
                )
    if rank == 0 and paths:
        write(Path(paths[0]), {"benchmark": "parallel", "ranks": RANKS, "baseline": "by hand", "seconds": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    open_text(DATA, seed=0)  # prepared once, before the ranks open it
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(on_one_rank, (folder, sys.argv[1:]), RANKS, start_method="spawn")
