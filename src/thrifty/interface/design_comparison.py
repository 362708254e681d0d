"""Comparison of accelerator designs on one trace, with one or several filters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import RenderableType
from rich.table import Table

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.user_objects import UserObjects
from thrifty.reporting.number_format import MISSING, duration, percent, scaled, significant
from thrifty.reporting.printed_result import PrintedResult, lines, number_table
from thrifty.reporting.run_record import run_folder
from thrifty.simulators.accelerator.accelerator_simulation import simulate
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.design_filters import EXACT, apply_design_filter, filter_within_error, uses_masks
from thrifty.simulators.accelerator.energy_model import by_tables, table_names
from thrifty.simulators.accelerator.iso_peak import iso_peak
from thrifty.simulators.accelerator.masked_replay import replay_with_masks
from thrifty.simulators.accelerator.measured_attention import all_pairs_seconds, kept_pairs_seconds
from thrifty.simulators.accelerator.simulation_result import SimulationResult, frame
from thrifty.training.data_opening import open_examples
from thrifty.training.evaluation import held_out_loss
from thrifty.training.trained_model import load_trained_model

if TYPE_CHECKING:
    from pandas import DataFrame

Filter = Literal["trace", "exact", "own"]
COSTS = ("softmax kept", "output error")
"""Keys in the provenance of a trace with masks of a filter: kept fraction of the softmax, and relative error of the
outputs."""
RESULT_COLUMNS = ("design", "cycles", "time", "multipliers", "utilization", "dense rate", "in and out",
                  "energy, modules", "energy, actions", "area")  # fmt: skip
ABOUT_MASKS = (
    "Density and cost of the masks. Thresholds and ViTCoD's average maps come from the evaluated examples. "
    "Detectors that a paper trains are not trained here. Masks of every layer come from the model with full attention."
)
ABOUT_HERE = (
    "Simulated times are for the accelerator. Times of this machine: all pairs with torch's attention "
    "(causal if the trace is), masked pairs with scipy on one thread. No paper publishes the ratio of these times."
)


@dataclass(frozen=True)
class DesignCase:
    """A design with one filter."""

    design: str
    """Design name as typed by the user."""
    filter: str
    trace: AttentionTrace
    result: SimulationResult
    kept_here: float | None
    """Seconds of this machine for the kept query-key pairs."""
    loss: float | None
    """Held-out loss of the model if it uses the design's masks."""

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.result.as_dict(),
            "filter": self.filter,
            "masks": {"density": self.trace.density, **self.trace.provenance},
            "held_out_loss": self.loss,
            "measured_here": {"kept_pairs": self.kept_here},
        }


@dataclass(frozen=True, repr=False)
class DesignComparison(PrintedResult):
    """Simulated attention of a trace on every design with every filter."""

    trace: AttentionTrace
    cases: tuple[DesignCase, ...]
    here: Mapping[str, float | None]
    """Seconds of this machine for all query-key pairs, by method; empty if not measured."""
    loss: float | None
    """Held-out loss of the traced model."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """Resources that are equal for all designs."""
    baseline: str | None = None
    """Design that the others are compared with, at equal peak operations per second and with the first filter."""
    all_tables: bool = False
    """True to print energies by every energy table."""

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.filter for case in self.cases))

    @property
    def has_mask_costs(self) -> bool:
        return self.loss is not None or self.filters != ("trace",)

    def table(self) -> "DataFrame":
        """Return one row per design and filter as a `pandas.DataFrame`. Raise UsageError without pandas."""
        return frame([case.result for case in self.cases])

    def as_dict(self) -> dict[str, Any]:
        return {
            "budget": dict(self.budget),
            "trace": self.trace.name,
            "held_out_loss": self.loss,
            "measured_here": dict(self.here),
            "results": [case.as_dict() for case in self.cases],
        }

    def __rich__(self) -> RenderableType:
        trace, results = self.trace, [case.result for case in self.cases]
        stalls = [
            [result.machine.name, name]
            + [percent(getattr(time, kind) / (time.busy + time.starved + time.blocked)) for kind in vars(time)]
            for result in results
            for name, time in result.stations.items()
        ]
        sentences: list[RenderableType] = [
            f"{trace.name}: {len(trace.layers)} layers, {trace.units} heads, density {trace.density:.3f}\n",
            number_table(RESULT_COLUMNS, [result_cells(result) for result in results]),
            "",
            number_table(["design", "station", "busy", "starved", "blocked"], stalls),
            "",
            *remarks(self),
        ]
        if self.has_mask_costs:
            sentences += [f"\n{ABOUT_MASKS}", number_table(*mask_cells(self))]
        if self.here:
            sentences += [f"\n{ABOUT_HERE}", number_table(*measured_cells(self))]
        if self.baseline is not None:
            other = next(case.result for case in self.cases if case.design == self.baseline)
            sentences.append(
                f"\nAt equal peak, the speedup over {other.machine.name} is the product of the reduction of "
                "operations and the relative utilization:"
            )
            sentences.append(_factors(results, other))
        if self.all_tables:
            sentences += [f"\nThe same actions by each table ({', '.join(table_names())}):", _energies(results)]
        return lines(*sentences)


def _factors(results: Sequence[SimulationResult], other: SimulationResult) -> Table:
    kinds = ("ratio", "omitted", "utilisation", "other_utilisation")
    compared = {result.machine.name: iso_peak(result, other) for result in results if result is not other}
    rows = [[name, *(f"{getattr(factors, kind):.3g}" for kind in kinds)] for name, factors in compared.items()]
    return number_table(["design", "faster", "fewer operations", "utilization", f"of {other.machine.name}"], rows)


def _energies(results: Sequence[SimulationResult]) -> Table:
    estimates = [by_tables(result.operations) for result in results]
    rows = [
        [result.machine.name, *(format_joules(energy.total) for energy in energies)]
        for result, energies in zip(results, estimates, strict=True)
    ]
    return number_table(["design", *(energy.table for energy in estimates[0])], rows)


def result_cells(result: SimulationResult) -> list[str]:
    """Return the cells of RESULT_COLUMNS."""
    row = result.row()
    return [
        row["machine"],
        f"{row['cycles']:,}",
        duration(row["seconds"]),
        f"{row['multipliers']:,}",
        percent(row["utilisation"]),
        scaled(row["dense_operations_per_second"], "op/s"),
        scaled(row["outer_bytes"], "B"),
        *(format_joules(row[key]) for key in ("energy_by_activity", "energy_by_actions")),
        MISSING if row["area_mm2"] is None else f"{row['area_mm2']:.3g} mm²",
    ]


def remarks(comparison: DesignComparison) -> list[str]:
    """Return the conditions of the results, one sentence each."""
    sentences = [
        "Energies of modules are published values and exclude an outer memory. Energies of actions include it, by "
        f"{comparison.cases[0].result.row()['energy_table']}. Areas of different process nodes are not comparable."
    ]
    without = [case.design for case in comparison.cases if "dram" not in case.result.machine.memories]
    if 0 < len(without) < len(comparison.cases):
        named = ", ".join(dict.fromkeys(without))
        sentences.append(
            f"{named}: no outer memory, so energies exclude its accesses; --equal-resources bandwidth=… adds one to all"
        )
    for case in comparison.cases:
        if case.trace.provenance.get("within allowed") == "no":
            allowed = case.trace.provenance["error allowed"]
            sentences.append(f"{case.result.machine.name}: no threshold of its filter keeps the error below {allowed}")
    sentences += [note for case in comparison.cases for note in case.result.notes]
    for case in comparison.cases:
        if case.result.machine.grade in "SM":
            sentences.append(f"{case.design} is not verified: {case.result.machine.source}")
        for energy in case.result.energies:
            if energy.unpriced:
                sentences.append(f"{case.design}: {energy.table} has no energy for {', '.join(energy.unpriced)}")
    return list(dict.fromkeys(sentences))


def mask_cells(comparison: DesignComparison) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table of mask densities and mask costs."""
    head = ["design", "density", *COSTS]
    rows = [
        [case.result.machine.name, f"{case.trace.density:.3f}", *(case.trace.provenance.get(k, MISSING) for k in COSTS)]
        for case in comparison.cases
    ]
    if comparison.loss is None:
        return head, rows
    losses = [MISSING if case.loss is None else f"{case.loss:.4f}" for case in comparison.cases]
    head.append(f"held-out loss ({comparison.loss:.4f} as traced)")
    return head, [[*row, loss] for row, loss in zip(rows, losses, strict=True)]


def measured_cells(comparison: DesignComparison) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows of the table of simulated times and of times on this machine."""
    here = [duration(seconds) for seconds in comparison.here.values()]
    rows = [
        [case.result.machine.name, duration(case.result.seconds), *here, duration(case.kept_here)]
        for case in comparison.cases
    ]
    pairs = (f"here, all pairs, {name}" for name in comparison.here)
    return ["design", "simulated", *pairs, "here, its pairs, scipy"], rows


def format_joules(energy: float | None) -> str:
    """Format an energy: 0.00387 becomes "3.87 mJ"."""
    if energy is None:
        return MISSING
    size, unit = next(((s, u) for s, u in ((1, "J"), (1e-3, "mJ"), (1e-6, "µJ")) if energy >= s), (1e-9, "nJ"))
    return f"{significant(energy / size)} {unit}"


def masks_of(
    trace: AttentionTrace,
    filters: Sequence[str],
    machines: Sequence[AcceleratorSpec],
    density: float,
    error: float | None,
) -> dict[str, dict[str, AttentionTrace]]:
    """Return the trace with the masks of each filter, by filter and machine. The trace is unchanged for a machine that
    computes all pairs.
    """

    @cache
    def under(name: str) -> AttentionTrace:
        return apply_design_filter(trace, name, density) if error is None else filter_within_error(trace, name, error)

    traces = {}
    for name in filters:
        masking = [machine for machine in machines if name != "trace" and uses_masks(machine)]
        masked = {machine.name: under(machine.design if name == "own" else EXACT) for machine in masking}
        traces[name] = {machine.name: trace for machine in machines} | masked
    return traces


def compare_designs(
    machines: Sequence[AcceleratorSpec],
    trace: AttentionTrace,
    masks: Mapping[str, Mapping[str, AttentionTrace]],
    engine: str,
    table: str,
    *,
    draw: bool,
    measure: bool,
    run: Any = None,
    objects: UserObjects | None = None,
) -> DesignComparison:
    """Simulate machines on a trace. `masks` contains the masked trace of each filter and machine. With several filters,
    the name of a result consists of design and filter.
    """
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
        loss, *others = held_out_losses(run, [trace, *different.values()], objects)
        losses = dict(zip(different, others, strict=True))
    cases = tuple(
        DesignCase(design, name, masked, result, took[id(masked)], losses[id(masked)])
        for design, name, masked, result in results
    )
    return DesignComparison(trace, cases, _all_pairs_here(trace) if measure else {}, loss)


def _all_pairs_here(trace: AttentionTrace) -> dict[str, float | None]:
    threads = torch.get_num_threads()
    seconds = {f"processor, {threads} thread{'s' * (threads > 1)}": all_pairs_seconds(trace)}
    if torch.cuda.is_available():
        seconds[torch.cuda.get_device_name()] = all_pairs_seconds(trace, "cuda", times=10)
    return seconds


def held_out_losses(run: Any, traces: Sequence[AttentionTrace], objects: UserObjects | None = None) -> list[float]:
    """Return the loss of a run's model on the traced held-out examples, once with the masks of each trace.

    The first trace has no masks. Raises UsageError if the trace belongs to another run. Raises RefusedError if
    the model's attention is not a softmax over pairs.
    """
    folder = run_folder(run)
    traced = traces[0].provenance.get("run")
    if traced != folder.name or "examples" not in traces[0].provenance:
        raise UsageError(
            f"the trace belongs to {traced or 'no run'!r}, not to {folder.name!r}", fix=f"thrifty trace {folder}"
        )
    model, recipe = load_trained_model(folder, plain=False, objects=objects)
    objective, opened = open_examples(recipe, run=folder)
    count = int(traces[0].provenance["examples"])

    def loss() -> float:
        return held_out_loss(model, objective, opened.held_out.batches(count, count), torch.device("cpu"))

    losses, own = [], loss()
    for trace in traces:
        with replay_with_masks(model, trace):
            losses.append(loss())
    if not math.isclose(own, losses[0], rel_tol=1e-3):
        raise RefusedError(
            f"the loss of {folder.name!r} is {own:.4f}, but {losses[0]:.4f} with plain softmax attention",
            fix="trace a run with plain softmax attention",
        )
    return losses
