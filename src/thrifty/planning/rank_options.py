"""Options that divide the work among ranks of this machine. They are one axis of a plan."""

from collections.abc import Iterable, Iterator
from itertools import product

from thrifty.core.mesh import Mesh
from thrifty.core.technique import Technique
from thrifty.planning.cluster_layouts import TECHNIQUES, meshes, recipe_mesh
from thrifty.planning.search_space import OptionTemplate

RANKS = "ranks"
SHARING = 0.85
"""Lowest expected factor on step time for ranks that share the cores of a CPU."""
LONGER = {"replicate": 1.02, "shard": 1.04, "tensor": 1.15}
"""Expected factor on step time for the collectives of each axis. A pipeline's factor depends on micro-batches."""
DEEPER = 1.03
"""Expected factor on step time per ZeRO stage."""
ROUNDS = (1, 2, 4)
"""Numbers of micro-batches per pipeline rank."""

AxisUse = tuple[dict[str, dict[str, int]], float]
"""Techniques with settings, and the expected factor on step time."""


def without_rank_techniques(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Return `techniques` without parallel techniques, because the plan chooses the parallel techniques."""
    return tuple(technique for technique in techniques if not technique.divides_ranks)


def options_over_ranks(ranks: int, batch: int, device: str) -> Iterator[OptionTemplate]:
    """Yield options for all meshes of `ranks` ranks (`cluster_layouts.meshes`) that divide a batch equally.

    On a CPU, ranks share the cores, but wait less than the threads of a single rank. On GPUs, ranks divide the step
    time.
    """
    part = SHARING if device == "cpu" else 1 / ranks
    for mesh_sizes in meshes(ranks, ranks, ranks):
        mesh = recipe_mesh(mesh_sizes)
        own, left = divmod(batch, mesh_sizes.data)
        if left:
            continue
        for uses in product(_data_uses(mesh), _tensor_uses(mesh), _pipeline_uses(mesh, own)):
            techniques, factor = {}, part
            for named, longer in uses:
                techniques |= named
                factor *= longer
            yield OptionTemplate(techniques, factor, mesh=mesh)


def _data_uses(mesh: Mesh) -> Iterator[AxisUse]:
    if mesh.shard > 1:
        for zero in (1,) if mesh.pipeline > 1 else (1, 3):
            yield {TECHNIQUES["shard"]: {"zero": zero}}, LONGER["shard"] * DEEPER**zero
    elif mesh.replicate > 1:
        yield {TECHNIQUES["replicate"]: {}}, LONGER["replicate"]
    else:
        yield {}, 1.0


def _tensor_uses(mesh: Mesh) -> Iterator[AxisUse]:
    yield ({TECHNIQUES["tensor"]: {}}, LONGER["tensor"]) if mesh.tensor > 1 else ({}, 1.0)


def _pipeline_uses(mesh: Mesh, own: int) -> Iterator[AxisUse]:
    """Yield options of a pipeline by number of micro-batches. With fewer micro-batches, the bubble is larger."""
    stages = mesh.pipeline
    if stages == 1:
        yield {}, 1.0
        return
    for parts in (stages * rounds for rounds in ROUNDS if own % (stages * rounds) == 0):
        yield {TECHNIQUES["pipeline"]: {"micro_batches": parts}}, 1 + (stages - 1) / parts
