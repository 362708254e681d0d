"""Of many micro-batches that are alike, the two that tell what a step with all of them holds and computes."""

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
"""The first has no gradients beside it; each of the others has, and holds what the second does."""
SEES_ALL = {Stage.SPLIT, Stage.CUT, *range(Stage.SOURCE, Stage.ACCUMULATE)}
"""Stages whose backward pass looks at the whole batch before it is cut."""


def representative_micro_batches(run: Run, batch: Batch) -> tuple[Run, Batch, float]:
    """The run in two micro-batches where it has more, all of one size; their examples; and in how many times the FLOPs
    a whole step is done. The run as it is, and 1.0, where they are not alike."""
    cutting = [technique for technique in run.techniques if Claim.MICRO_BATCHES in technique.claims]
    rows = -(-len(batch) // (cutting[0].micro_batches if cutting else 1))
    alike = len(batch) // rows
    if alike <= ENOUGH or len(batch) % rows or run.objective.joint or any(map(_sees_all, run.techniques)):
        return run, batch, 1.0
    fewer: dict[str, Any] = {"micro_batches": ENOUGH}
    techniques = tuple(replace(t, **fewer) if t in cutting else t for t in run.techniques)
    return replace(run, techniques=techniques), batch.rows(0, ENOUGH * rows), alike / ENOUGH


def data_shard_count(techniques: Sequence[Technique]) -> int:
    """Into how many equal parts techniques that need several ranks divide the examples of a step before a model sees
    them: those of the ranks along the data, and the micro-batches of a pipeline."""
    shares = 1
    for technique in techniques:
        if Claim.DATA_PARALLELISM in technique.claims:
            shares *= axis("data").size
        if Claim.PIPELINE_PARALLELISM in technique.claims and axis("pipeline").size > 1:
            shares *= technique.micro_batches
    return shares


def _sees_all(technique: Technique) -> bool:
    return technique.stage in SEES_ALL and technique.overrides("backward")
