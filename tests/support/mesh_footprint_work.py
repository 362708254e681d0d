"""Predicted and measured peak memory of a rank of a small mesh, by the allocator's events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.allocator_trace import measure_allocations
from tiny_runs import ROOM, VOCABULARY, corpus, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core import mesh
from thrifty.data.text.token_windows import PackedTokens
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.planning.cost_estimates import count_footprint

LENGTH, BATCH, STEPS = 64, 8, 2


@dataclass(frozen=True)
class Case:
    axes: Mapping[str, int]
    techniques: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    depth: int = 4
    width: int = 64


def build(depth: int, width: int) -> nn.Module:
    model = assemble(ModelConfig("llama", depth, width, 4, 2, 3 * width, VOCABULARY, LENGTH + ROOM, True))
    initialize(model, 0)
    return model


def predicted_and_held(cases: Sequence[Case]) -> list[tuple[float, int]]:
    """Return the peak bytes of each case on this rank."""
    found = []
    for case in cases:
        mesh.set_mesh(dict.fromkeys(mesh.AXES, 1) | case.axes, "cpu")
        try:
            source = PackedTokens(corpus(), LENGTH, BATCH, seed=0)
            plain = BaseRun(lambda case=case: build(case.depth, case.width), source, NextToken())
            chosen = [technique(name, **settings) for name, settings in case.techniques.items()]
            run = compose(plain, with_optimizer(chosen), STEPS)
            # all steps have equal peaks, unless a process group's thread frees tensors late
            found.append((count_footprint(run).memory, min(measure_allocations(run).peaks)))
        finally:
            mesh.clear_mesh()
    return found
