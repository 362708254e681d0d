"""Ways to divide the work among ranks of this machine: one more axis of a plan."""

from collections.abc import Iterable, Iterator
from itertools import product

from thrifty.core.mesh import Mesh
from thrifty.core.technique import Technique
from thrifty.planning.cluster_layouts import TECHNIQUES, in_a_recipe, meshes
from thrifty.planning.search_space import OptionTemplate

RANKS = "ranks"
SHARING = 0.85
"""What ranks may gain at best by sharing cores."""
LONGER = {"replicate": 1.02, "shard": 1.04, "tensor": 1.15}
"""By what collectives along an axis are expected to lengthen a step; a pipeline's bubble follows from its parts."""
DEEPER = 1.03
"""The same for each stage of ZeRO."""
ROUNDS = (1, 2, 4)
"""Micro-batches of a pipeline, in how many of its ranks."""

Use = tuple[dict[str, dict[str, int]], float]
"""Techniques with their settings, and by what factor they lengthen a step."""


def without_rank_techniques(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    """Without those that give work to several ranks: which of them are to do so is for a plan to say."""
    return tuple(technique for technique in techniques if not technique.divides_ranks)


def options_over_ranks(ranks: int, batch: int, device: str) -> Iterator[OptionTemplate]:
    """The meshes of so many ranks (`cluster_layouts.meshes`) that can share a batch equally, with the techniques that
    use their axes.

    On a processor ranks share the cores that one would have to itself, and wait less for each other than its threads;
    of GPUs each does its part in its part of the time.
    """
    part = SHARING if device == "cpu" else 1 / ranks
    for mesh_sizes in meshes(ranks, ranks, ranks):
        mesh = in_a_recipe(mesh_sizes)
        own, left = divmod(batch, mesh_sizes.data)
        if left:
            continue
        for uses in product(_of_data(mesh), _of_layers(mesh), _of_blocks(mesh, own)):
            techniques, factor = {}, part
            for named, longer in uses:
                techniques |= named
                factor *= longer
            yield OptionTemplate(techniques, factor, mesh=mesh)


def _of_data(mesh: Mesh) -> Iterator[Use]:
    if mesh.shard > 1:
        for zero in (1,) if mesh.pipeline > 1 else (1, 3):
            yield {TECHNIQUES["shard"]: {"zero": zero}}, LONGER["shard"] * DEEPER**zero
    elif mesh.replicate > 1:
        yield {TECHNIQUES["replicate"]: {}}, LONGER["replicate"]
    else:
        yield {}, 1.0


def _of_layers(mesh: Mesh) -> Iterator[Use]:
    yield ({TECHNIQUES["tensor"]: {}}, LONGER["tensor"]) if mesh.tensor > 1 else ({}, 1.0)


def _of_blocks(mesh: Mesh, own: int) -> Iterator[Use]:
    """In micro-batches of the examples of a data rank; with few of them most ranks wait."""
    stages = mesh.pipeline
    if stages == 1:
        yield {}, 1.0
        return
    for parts in (stages * rounds for rounds in ROUNDS if own % (stages * rounds) == 0):
        yield {TECHNIQUES["pipeline"]: {"micro_batches": parts}}, 1 + (stages - 1) / parts
