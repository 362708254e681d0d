"""Predictions of plans against measured runs: peak memory, step time, and the order of plans.

    python benchmarks/bench_plan.py [FILE.json] [--models gpt GPT-2 …] [--only TECHNIQUES …] [--meshes shard=2 …]
                                    [--seconds N] [--no-steps]

Promise: the predicted peak is within 5 % in the median, and the measured one below the upper bound in 95 % of
configurations. No configuration predicted to fit fails to fit. After probing, step time is within 10 % in the median,
and the order of pairs that differ by more than 10 % is correct in 90 %.

Peaks come from the allocator's events. The models are those used to find the bounds, and small unseen ones of
`transformers`. Over a mesh two gloo ranks train, and the rank with the higher peak counts. Memory freed by the thread
of a process group has no event, and counts until its place is reused. Step time is predicted as in a plan, from a probe
of whole steps (at two or three micro-batch sizes; over a mesh at the given one). The training loop measures it
afterwards; the machine's load is recorded, since other programs disturb it. Memory alone (--no-steps) requires no quiet
machine.
"""

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from allocator_trace import measure_allocations
from bench_footprints import MODELS, chosen, one_rank
from side_by_side import write
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core import mesh
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.technique import Technique
from thrifty.planning.cost_estimates import COUNTED_HIGH, OVER_MESH_HIGH, count_footprint
from thrifty.planning.probe_jobs import sizes
from thrifty.planning.step_timing import time_steps
from thrifty.training.loop import train
from thrifty.training.run_setup import prepare_run
from unseen_models import UNSEEN, recipe_for, write_all

STEPS, TIMED_STEPS = 6, 22
"""Steps of the run whose memory is measured, and of the run whose steps are timed."""
APART = 0.1
"""Relative difference from which the order of plans counts."""
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "recompute": {"memory.recompute": {}},
    "recompute, every 2": {"memory.recompute": {"every": 2}},
    "recompute, selective": {"memory.recompute": {"schedule": "selective"}},
    "optimal recompute": {"memory.optimal_recompute": {"bytes": 0.5}},
    "activation budget": {"memory.activation_budget": {"bytes": 0.5, "cost_source": "counted"}},
    "compress, 4 bits": {"memory.compress_activations": {"bits": 4}},
    "offload activations": {"memory.offload_activations": {}},
    "8-bit optimizer state": {"precision.optimizer_state": {}},
    "offload optimizer": {"memory.offload_optimizer": {}},
    "mixed": {"precision.mixed": {}},
    "bfloat16 weights": {"precision.bfloat16_weights": {"rounding": "kahan"}},
    "accumulate 2": {"large_batch.gradient_accumulation": {"micro_batches": 2}},
    "accumulate 4": {"large_batch.gradient_accumulation": {"micro_batches": 4}},
    "lora": {"adapters.lora": {}},
    "mixed + recompute + accumulate 2": {
        "precision.mixed": {}, "memory.recompute": {}, "large_batch.gradient_accumulation": {"micro_batches": 2},
    },
}  # fmt: skip


MESHES: dict[str, tuple[dict[str, int], dict[str, dict[str, Any]]]] = {
    "replicate=2": ({"replicate": 2}, {"parallelism.replicate": {}}),
    "shard=2": ({"shard": 2}, {"parallelism.shard": {}}),
    "shard=2, zero 1": ({"shard": 2}, {"parallelism.shard": {"zero": 1}}),
    "tensor=2": ({"tensor": 2}, {"parallelism.tensor": {}}),
    "pipeline=2": ({"pipeline": 2}, {"parallelism.pipeline": {"micro_batches": 2}}),
    "shard=2 + recompute": ({"shard": 2}, {"parallelism.shard": {}, "memory.recompute": {}}),
    "replicate=2 + accumulate 2": (
        {"replicate": 2},
        {"parallelism.replicate": {}, "large_batch.gradient_accumulation": {"micro_batches": 2}},
    ),
    "tensor=2 + mixed": ({"tensor": 2}, {"parallelism.tensor": {}, "precision.mixed": {}}),
}
OVER_MESHES = ("GPT-2", "Llama")
FOREVER = 600.0
"""Seconds per model and mesh after which ranks count as hanging."""


@dataclass(frozen=True)
class Case:
    """Predicted and measured bytes and seconds; seconds are 0 if steps were not timed."""

    model: str
    techniques: str
    predicted_memory: float
    measured_memory: int
    predicted_step: float = 0.0
    measured_step: float = 0.0
    bound: float = COUNTED_HIGH
    """Ratio of the plan's upper bound to the prediction."""
    load: float = 0.0
    """Load average of the last minute at the measurement."""

    @property
    def memory_error(self) -> float:
        return self.predicted_memory / self.measured_memory - 1

    @property
    def step_error(self) -> float:
        return self.predicted_step / self.measured_step - 1

    def __str__(self) -> str:
        sizes = f"{self.predicted_memory / 1e6:8.2f} {self.measured_memory / 1e6:8.2f} MB {self.memory_error:+7.2%}"
        steps = f" {self.predicted_step:7.3f} {self.measured_step:7.3f} s {self.step_error:+7.1%}" if self.load else ""
        return f"{self.model:<12} {self.techniques:<34} {sizes}{steps}"


def plain_run(model: str, folder: Path) -> BaseRun:
    if model in MODELS:
        return MODELS[model].run()
    return prepare_run(recipe_for(model, folder, chosen({}), STEPS), quiet=True).run.plain


def measured(model: str, label: str, seconds: float, folder: Path) -> Case:
    plain, techniques = plain_run(model, folder), chosen(PLANS[label])
    torch._dynamo.reset()
    run = compose(plain, techniques, STEPS)
    case = Case(model, label, count_footprint(run).memory, measure_allocations(run).peak)
    if not seconds:
        return case
    splitting = [technique for technique in techniques if Claim.MICRO_BATCHES in technique.claims]
    parts = max((technique.micro_batches for technique in splitting), default=1)
    probed = compose(plain, [technique for technique in techniques if technique not in splitting], TIMED_STEPS)
    return with_steps(case, probed, techniques, sizes(plain.source.batch, parts, compiled=False), parts, seconds)


def with_steps(
    case: Case, probed: Run, techniques: Sequence[Technique], rows: Sequence[int], parts: int, seconds: float
) -> Case:
    """Return the case with the step time that a probe at these sizes predicts, and the measured one."""
    plain = probed.plain
    held_out = [plain.objective.examples(plain.source.at(0))]
    timing = time_steps(probed, rows, parts, held_out, seconds)
    run = compose(plain, techniques, TIMED_STEPS)
    with closing(train(run, run.start(), seed=0)) as records:
        seconds_per_step = [record.seconds for record in records][2:]
    step = timing.step(plain.source.batch, parts)
    return replace(case, predicted_step=step, measured_step=median(seconds_per_step), load=os.getloadavg()[0])


def over_meshes(pairs: Sequence[tuple[str, str]], seconds: float, folder: Path) -> list[Case | str]:
    """Return for each model and mesh the case of the rank with the higher peak, or the message of a refusal."""
    spawned = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as meeting, spawned.Pool(2) as ranks:
        arguments = [(rank, str(Path(meeting, "store")), pairs, seconds, folder) for rank in range(2)]
        one, other = ranks.starmap_async(_on_rank, arguments, chunksize=1).get(FOREVER * len(pairs))
    return [_worse(*results) for results in zip(one, other, strict=True)]


def _worse(*results: Case | str) -> Case | str:
    cases = [result for result in results if isinstance(result, Case)]
    refusals = (result for result in results if isinstance(result, str))
    return next(refusals, None) or max(cases, key=lambda case: case.measured_memory)


def _on_rank(rank: int, store: str, pairs: Sequence[tuple[str, str]], seconds: float, folder: Path) -> list[Case | str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    try:
        return [_over_mesh(model, label, seconds, folder) for model, label in pairs]
    finally:
        dist.destroy_process_group()


def _over_mesh(model: str, label: str, seconds: float, folder: Path) -> Case | str:
    """Measure one case on this rank; steps are timed with their micro-batches, as in plans."""
    sizes, settings = MESHES[label]
    try:
        run = prepare_run(recipe_for(model, folder, chosen(settings), STEPS, sizes), quiet=True).run
        case = Case(model, label, count_footprint(run).memory, measure_allocations(run).peak, bound=OVER_MESH_HIGH)
        batch = run.plain.source.batch
        return with_steps(case, run, run.techniques, (batch,), 1, seconds) if seconds else case
    except UsageError as error:
        return error.what
    finally:
        mesh.clear_mesh()


def in_order(cases: Sequence[Case]) -> tuple[int, int]:
    """Return the number of correctly ordered pairs on one model whose steps differ by more than a tenth, and of all
    such pairs."""
    correct = pairs = 0
    for one, other in combinations(cases, 2):
        if one.model != other.model or abs(one.measured_step / other.measured_step - 1) <= APART:
            continue
        pairs += 1
        correct += (one.predicted_step < other.predicted_step) == (one.measured_step < other.measured_step)
    return correct, pairs


def summary(cases: Sequence[Case]) -> Mapping[str, Any]:
    memory = sorted(abs(case.memory_error) for case in cases)
    under = sum(case.measured_memory <= case.predicted_memory * case.bound for case in cases)
    figures: dict[str, Any] = {
        "configurations": len(cases),
        "memory: median error": median(memory),
        "memory: largest error": memory[-1],
        "memory: under the upper bound": under / len(cases),
        "memory: promised to fit and did not": len(cases) - under,
    }
    steps = [case for case in cases if case.load]
    if steps:
        correct, pairs = in_order(steps)
        figures |= {
            "step: median error": median(abs(case.step_error) for case in steps),
            "order: pairs": pairs,
            "order: told right": correct / pairs if pairs else None,
            "load: median": median(case.load for case in steps),
        }
    return figures


def table(
    models: Sequence[str], plans: Sequence[str], meshes: Sequence[str], seconds: float, folder: Path
) -> tuple[list[Case], dict[str, str]]:
    """Return all cases, printed as they finish, and the messages of refused ones."""
    cases: list[Case] = []
    refused: dict[str, str] = {}

    def add(model: str, label: str, case: Callable[[], Case]) -> None:
        try:
            cases.append(case())
            print(cases[-1], flush=True)
        except UsageError as error:
            refused[f"{model}: {label}"] = error.what

    with one_rank():
        for model, label in product(models, plans):
            add(model, label, lambda model=model, label=label: measured(model, label, seconds, folder))
    pairs = [*product(OVER_MESHES, meshes)]
    for (model, label), result in zip(pairs, over_meshes(pairs, seconds, folder) if pairs else [], strict=True):
        if isinstance(result, str):
            refused[f"{model}: {label}"] = result
        else:
            cases.append(result)
            print(result, flush=True)
    return cases, refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, help="results file")
    every = [*MODELS, *UNSEEN]
    parser.add_argument("--models", choices=every, nargs="*", default=every)
    parser.add_argument("--only", choices=PLANS, nargs="+", default=list(PLANS), metavar="TECHNIQUES")
    parser.add_argument("--meshes", choices=MESHES, nargs="*", default=list(MESHES), metavar="MESH")
    parser.add_argument("--seconds", type=float, default=6.0, help="time limit of a probe's steps")
    parser.add_argument("--no-steps", action="store_true", help="measure memory only")
    options = parser.parse_args()
    seconds = 0.0 if options.no_steps else options.seconds
    with tempfile.TemporaryDirectory() as folder:
        write_all(Path(folder))
        cases, refused = table(options.models, options.only, options.meshes, seconds, Path(folder))
    for label, what in refused.items():
        print(f"refused: {label}: {what}")
    figures = summary(cases)
    for name, value in figures.items():
        print(f"{name:<32} {value:.4g}" if value is not None else f"{name:<32} –")
    if options.path:
        write(options.path, {"benchmark": "plan", **figures, "refused": refused, "cases": [asdict(c) for c in cases]})


if __name__ == "__main__":
    main()
