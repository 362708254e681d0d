"""Random numbers in regions of a model in which each tensor-parallel rank holds a part of the activations.

Outside such regions, all ranks have the same activations and sample the same numbers. Inside a region, each rank must
sample different numbers, because the heads of all ranks would otherwise have the same dropout mask. A region therefore
samples one common number. This number and the index of the rank seed the region's generator. The common generator
advances by one number, also if the forward pass is recomputed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from thrifty.core.randomness import seed_of


@contextmanager
def parallel_randomness(place: int) -> Iterator[None]:
    """Within the context, use the random numbers of the rank `place`."""
    common = int(torch.empty((), dtype=torch.int64).random_())
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed_of(f"{common}/{place}"))
        yield


def drops(module: nn.Module) -> bool:
    """Return True if a module applies dropout, by a submodule or by a dropout rate attribute."""
    own = [child.p for child in module.modules() if isinstance(child, _DropoutNd)]
    passed = [value for child in module.modules() for name, value in vars(child).items() if "drop" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in (*own, *passed))


class ParallelRandomRegion:
    """The part of a module's forward pass with divided activations: from its first column layer to its row layer."""

    def __init__(self, place: int):
        self.place = place
        self._open = ExitStack()
        self._entered = False

    def enter(self) -> None:
        if not self._entered:
            self._entered = True
            self._open.enter_context(parallel_randomness(self.place))

    def leave(self) -> None:
        self._open.close()
        self._entered = False
