"""Order in which techniques act on a run. It is defined only here.

`model`, `batches`, `objective` and `footprint` are applied in this order: each technique receives the result of the
earlier ones. `backward` and `update` wrap: the earlier stage receives the later ones as the function that it calls.
A gradient therefore passes the stages in this order, and a finished update passes them in reverse. In `update`, the
stages of `HOW` wrap all others, because they decide where the whole chain runs.

Two techniques of one stage must commute. If they do not, a stage is missing here.
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
"""Stages that change how something is computed, but not its result."""
