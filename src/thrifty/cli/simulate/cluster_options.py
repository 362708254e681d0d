"""The model, the mesh and the settings that a simulated step is asked for on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.core.errors import RefusedError, UsageError, did_you_mean, refuse_unknown

if TYPE_CHECKING:
    from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
    from thrifty.simulators.cluster.published_runs import PublishedRun
    from thrifty.simulators.cluster.workload import Workload

CONTEXT = 8192
"""Tokens of an example unless given, for models made for more."""


def find_workload(model: str, length: int | None, flash: bool) -> Workload:
    """A published model by its sizes; a preset or a folder traced."""

    from thrifty.simulators.cluster.closed_form_workload import transformer
    from thrifty.simulators.cluster.published_runs import MODELS, RUNS

    if model in MODELS:
        sizes = MODELS[model]
        return transformer(model, replace(sizes, length=length or sizes.length))
    from thrifty.models.families import assemble
    from thrifty.models.model_presets import PRESETS
    from thrifty.models.weight_conversion import folder_shape
    from thrifty.simulators.cluster.traced_workload import trace_workload

    shape = PRESETS.get(model)
    if shape is None and Path(model).is_dir():
        try:
            shape = folder_shape(Path(model), fresh=True)
        except RefusedError:  # an architecture that only transformers computes
            return _from_transformers(Path(model), length or CONTEXT, flash)
    if shape is None:
        raise UsageError(f"there is no model {model!r}", fix=did_you_mean(model, [*PRESETS, *MODELS, *RUNS]))
    length = length or min(shape.length, CONTEXT)
    shape = replace(shape, length=max(length, shape.length))
    name = Path(model).name if Path(model).is_dir() else model
    return trace_workload(name, lambda: assemble(shape), length, flash=flash)


def _from_transformers(folder: Path, length: int, flash: bool) -> Workload:
    from thrifty.simulators.cluster.traced_workload import trace_workload

    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"{folder} needs the package transformers", fix="pip install 'thrifty[huggingface]'"
        ) from error
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    build = transformers.AutoModelForCausalLM.from_config
    return trace_workload(folder.name, lambda: build(config, trust_remote_code=False), length, flash=flash)


def read_mesh(text: str | None, ranks: int | None, run: PublishedRun | None, all_ranks: int) -> ClusterMesh:
    """`tensor=8,pipeline=16` as a mesh; what the axes that are given leave of the ranks is replicate's."""
    from thrifty.simulators.cluster.cluster_mesh import ClusterMesh

    if text is None and run is not None and ranks in (None, run.mesh.ranks):
        return run.mesh
    axes, sizes = ("replicate", "shard", "tensor", "pipeline", "chunks"), {}
    for word in filter(None, (text or "").split(",")):
        axis, _, size = word.partition("=")
        refuse_unknown("--mesh: there is no axis", axis.strip(), axes)
        if not size.strip().isdigit():
            raise UsageError(f"--mesh: {word.strip()!r} is no size", fix="for example --mesh tensor=8,pipeline=4")
        sizes[axis.strip()] = int(size)
    mesh = ClusterMesh(**sizes)
    if "replicate" not in sizes:
        ranks = ranks or (all_ranks if "shard" not in sizes else mesh.ranks)
        if ranks > mesh.ranks and ranks % mesh.ranks:
            fitting = ranks - ranks % mesh.ranks
            raise UsageError(f"{ranks} ranks are no multiple of the mesh's {mesh.ranks}", fix=f"--ranks {fitting}")
        return ClusterMesh(**sizes, replicate=max(ranks // mesh.ranks, 1))
    return mesh


def read_settings(changes: dict[str, Any], run: PublishedRun | None, mesh: ClusterMesh, formats: Any) -> StepSettings:
    """The settings of a published run, or plain ones, with what was given on the command line."""

    from thrifty.simulators.cluster.cluster_mesh import StepSettings

    overrides = {name: value for name, value in changes.items() if value is not None}
    if run is not None:
        return replace(run.settings, **overrides)
    micro_batch = overrides.get("micro_batch", 1)
    plain = StepSettings(
        # enough micro-batches that the bubble of a plain pipeline is a fifth
        batch=mesh.data * micro_batch * (4 * mesh.pipeline if mesh.pipeline > 1 else 1),
        schedule="interleaved" if mesh.chunks > 1 else "1f1b",
        number_format=next(name for name in ("bfloat16", "float16", "float32") if name in formats),
    )
    return replace(plain, **overrides)
