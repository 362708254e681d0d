"""The only statement of order in the system: where in a run a technique acts.

`model`, `batches`, `objective` and `footprint` are folded in this order, each technique receiving what the earlier ones
made. `backward` and `update` wrap: the earlier stage receives the later ones as the inner thing it calls, so that a
gradient passes the stages in this order and a finished update passes back through them in reverse. Only in `update` do
the stages of how something is computed come around all others: where a chain is run is decided of the whole of it.

Two techniques in one stage must commute; where they do not, a line is missing here.
"""

from enum import IntEnum, auto


class Stage(IntEnum):
    # what is computed
    INITIALIZE = auto()
    ARCHITECTURE = auto()
    ATTENTION = auto()
    SPARSITY = auto()
    ADAPTERS = auto()
    PRECISION = auto()
    COMPRESS = auto()
    # how it is computed: values and parameter names stay
    SPLIT = auto()
    CUT = auto()
    RECOMPUTE = auto()
    OFFLOAD = auto()
    COMPILE = auto()
    SHARD = auto()
    # data and loss
    SOURCE = auto()
    SELECT = auto()
    RESIZE = auto()
    RESHAPE = auto()
    OBJECTIVE = auto()
    # gradients
    MEASURE = auto()
    REDUCE = auto()
    ACCUMULATE = auto()
    # update
    CLIP = auto()
    PRECONDITION = auto()
    SCHEDULE = auto()
    AVERAGE = auto()
    # over time
    GROW = auto()

    @property
    def label(self) -> str:
        return self.name.lower()


HOW = range(Stage.SPLIT, Stage.SOURCE)
"""Stages that decide how something is computed, never what."""
