"""Random numbers where ranks that compute a model together each have a part of the activations.

Outside such regions all of these ranks draw alike, since they have the same activations. Inside, each must draw by
itself: equal masks for different heads would be one mask repeated. So a region draws one number from what all have in
common, and goes on from that and the rank's place. It leaves the common generator one number further than it was, also
when the forward pass is made again in the backward pass.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from thrifty.core.randomness import seed_of


@contextmanager
def parallel_randomness(place: int) -> Iterator[None]:
    """Random numbers of the rank at this place alone, for as long as the block lasts."""
    common = int(torch.empty((), dtype=torch.int64).random_())
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed_of(f"{common}/{place}"))
        yield


def drops(module: nn.Module) -> bool:
    """Whether a module drops anything out, by a module of its own or by a rate that it hands to a function."""
    own = [child.p for child in module.modules() if isinstance(child, _DropoutNd)]
    handed = [value for child in module.modules() for name, value in vars(child).items() if "drop" in name]
    return any(isinstance(rate, float) and rate > 0 for rate in (*own, *handed))


class ParallelRandomRegion:
    """The stretch of a module's forward pass in which each rank has its part: from its first column layer to its row
    layer."""

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
