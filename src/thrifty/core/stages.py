"""Order in which techniques act on a run. Only this module defines the order.

`model`, `batches`, `objective` and `footprint` are applied in order of stage. Each technique receives the result of the
earlier techniques. `backward` and `update` are nested: an earlier stage calls the later stages. A gradient therefore
passes the stages in order, and a finished update passes them in reverse. In `update`, the stages in `HOW` wrap all
other stages, because they decide where the whole chain runs.

Two techniques of one stage must commute. If they do not, a stage is missing.
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
"""Stages that change how a result is computed, but not the result."""
