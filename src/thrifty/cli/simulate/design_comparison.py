"""Designs beside each other on one trace, under one filter or several: what `thrifty simulate attention` runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
    from thrifty.simulators.accelerator.attention_trace import AttentionTrace
    from thrifty.simulators.accelerator.simulation_result import SimulationResult


@dataclass(frozen=True)
class DesignCase:
    """A design under one filter."""

    design: str
    """As it was named."""
    filter: str
    trace: AttentionTrace
    result: SimulationResult
    kept_here: float | None
    """Seconds of its pairs on this machine."""
    loss: float | None
    """Held-out loss of the model under its masks."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.result.as_dict(),
            "filter": self.filter,
            "masks": {"density": self.trace.density, **self.trace.provenance},
            "held_out_loss": self.loss,
            "measured_here": {"kept_pairs": self.kept_here},
        }


@dataclass(frozen=True)
class DesignComparison:
    """All cases of a trace."""

    trace: AttentionTrace
    cases: tuple[DesignCase, ...]
    here: Mapping[str, float | None]
    """Seconds of all pairs on what this machine has; empty where nothing was measured."""
    loss: float | None
    """Held-out loss of the model as it was traced."""

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.filter for case in self.cases))

    def as_dict(self) -> dict[str, Any]:
        return {
            "trace": self.trace.name,
            "held_out_loss": self.loss,
            "measured_here": dict(self.here),
            "results": [case.as_dict() for case in self.cases],
        }


def compare_designs(
    machines: Sequence[AcceleratorSpec],
    trace: AttentionTrace,
    masks: Mapping[str, Mapping[str, AttentionTrace]],
    engine: str,
    table: str,
    draw: bool,
    measure: bool,
    run: Path | None,
) -> DesignComparison:
    """`masks` are the trace under each filter for each machine by name. Under several filters results are called by
    both."""
    from thrifty.simulators.accelerator.accelerator_simulation import simulate
    from thrifty.simulators.accelerator.measured_attention import kept_pairs_seconds

    results = []
    for name, traces in masks.items():
        for machine in machines:
            called = machine if len(masks) == 1 else replace(machine, name=f"{machine.name}, {name}")
            masked = traces[machine.name]
            results.append((machine.name, name, masked, simulate(called, masked, engine, table, draw)))
    different = {id(masked): masked for _, _, masked, _ in results}
    took = {key: kept_pairs_seconds(masked) if measure else None for key, masked in different.items()}
    loss, losses = None, dict.fromkeys(different)
    if run is not None:
        loss, *others = held_out_losses(run, [trace, *different.values()])
        losses = dict(zip(different, others, strict=True))
    cases = tuple(
        DesignCase(design, name, masked, result, took[id(masked)], losses[id(masked)])
        for design, name, masked, result in results
    )
    return DesignComparison(trace, cases, _all_pairs_here(trace) if measure else {}, loss)


def _all_pairs_here(trace: AttentionTrace) -> dict[str, float | None]:
    import torch

    from thrifty.simulators.accelerator.measured_attention import all_pairs_seconds

    threads = torch.get_num_threads()
    seconds = {f"processor, {threads} thread{'s' * (threads > 1)}": all_pairs_seconds(trace)}
    if torch.cuda.is_available():
        seconds[torch.cuda.get_device_name()] = all_pairs_seconds(trace, "cuda", times=10)
    return seconds


def held_out_losses(run: Path, traces: Sequence[AttentionTrace]) -> list[float]:
    """Loss of a run's model on the held-out examples that were traced, under the masks of each trace, the first of
    which is as it was traced. Raises UsageError for traces of another run, and RefusedError for a model whose attention
    is more than softmax over some pairs."""
    import torch

    from thrifty.core.errors import RefusedError, UsageError
    from thrifty.reporting.run_record import find_run
    from thrifty.simulators.accelerator.masked_replay import replay_with_masks
    from thrifty.training.evaluation import held_out_loss
    from thrifty.training.run_setup import open_examples
    from thrifty.training.trained_model import load_trained_model

    folder = find_run(run)
    traced = traces[0].provenance.get("run")
    if traced != folder.name or "examples" not in traces[0].provenance:
        raise UsageError(f"the trace is of {traced or 'no run'}, not of {folder.name}", fix=f"thrifty trace {run}")
    model, recipe = load_trained_model(folder, plain=False)
    objective, opened = open_examples(recipe)
    count = int(traces[0].provenance["examples"])

    def loss() -> float:
        return held_out_loss(model, objective, opened.held_out.batches(count, count), torch.device("cpu"))

    losses, own = [], loss()
    for trace in traces:
        with replay_with_masks(model, trace):
            losses.append(loss())
    if not math.isclose(own, losses[0], rel_tol=1e-3):
        raise RefusedError(
            f"the loss of {folder.name} is {own:.4f}, and {losses[0]:.4f} by softmax over the pairs of its attention",
            fix="trace a run whose attention is no more than that",
        )
    return losses
