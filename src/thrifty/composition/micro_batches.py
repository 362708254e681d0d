"""Footprint of a step with many equal micro-batches, counted on two micro-batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thrifty.composition.compose import Run
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.mesh import axis
from thrifty.core.stages import Stage
from thrifty.core.technique import Technique

ENOUGH = 2
"""Number of micro-batches to count. Only the first runs without stored gradients; all later micro-batches use equal
memory."""
SEES_ALL = {Stage.SPLIT, Stage.CUT, *range(Stage.SOURCE, Stage.ACCUMULATE)}
"""Stages whose backward pass receives the whole batch before it is split."""


def representative_micro_batches(run: Run, batch: Batch) -> tuple[Run, Batch, float]:
    """Reduce a run to two micro-batches. Return the run, the examples of these micro-batches, and the factor from their
    FLOPs to the FLOPs of a whole step. If the run has at most two micro-batches, or unequal ones, return the unchanged
    run, the batch, and 1.0."""
    cutting = [technique for technique in run.techniques if Claim.MICRO_BATCHES in technique.claims]
    rows = -(-len(batch) // (cutting[0].micro_batches if cutting else 1))
    count = len(batch) // rows
    if count <= ENOUGH or len(batch) % rows or run.objective.joint or any(map(_sees_all, run.techniques)):
        return run, batch, 1.0
    fewer: dict[str, Any] = {"micro_batches": ENOUGH}
    techniques = tuple(replace(t, **fewer) if t in cutting else t for t in run.techniques)
    return replace(run, techniques=techniques), batch.rows(0, ENOUGH * rows), count / ENOUGH


def data_shard_count(techniques: Sequence[Technique]) -> int:
    """Return the number of equal parts into which parallel techniques divide the examples of a step. The result is the
    number of ranks along the data axis, times the micro-batches of a pipeline."""
    shards = 1
    for technique in techniques:
        if Claim.DATA_PARALLELISM in technique.claims:
            shards *= axis("data").size
        if Claim.PIPELINE_PARALLELISM in technique.claims and axis("pipeline").size > 1:
            shards *= technique.micro_batches
    return shards


def _sees_all(technique: Technique) -> bool:
    return technique.stage in SEES_ALL and technique.overrides("backward")
