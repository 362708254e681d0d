"""Work of each rank in tests of `thrifty check`, in a module that a new process can import."""

from pathlib import Path

import torch.distributed as dist
from torch import nn

from thrifty.checking.rank_check import work_as_rank
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.techniques.parallelism.shard import ShardedDataParallel

_sound = ShardedDataParallel.backward


def _divided_again(self: ShardedDataParallel, backward: Backward) -> Backward:
    inner = _sound(self, backward)

    def over_ranks(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = inner(model, objective, batch)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(dist.get_world_size())
        return outcome

    return over_ranks


def as_rank_that_divides_twice(folder: Path) -> None:
    """A rank's part of a check, with a sum over ranks that is taken for a mean once more."""
    ShardedDataParallel.backward = _divided_again  # type: ignore[method-assign]
    work_as_rank(folder)
