"""Time cost of saving activation memory: a step of a 12-block model with each technique, against a plain step.

Promise: at equal memory the joint plan is no slower than the best single technique, and compression to 4 bits costs at
most 30 % of a CPU step. Bytes are live tensors at the peak of a step, without parameters and gradients. Each technique
alternates with the plain step. The time is CPU time on one thread, so other processes and disk waits hardly count; wall
time is recorded too. With a file name, the table is saved, and a plot of memory against slowdown.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import altair
import torch
from torch import nn

from side_by_side import write
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.technique import Technique
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.tasks.language_task import BYTES, source_text
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory.activation_budget import ActivationBudget
from thrifty.techniques.memory.compress_activations import CompressActivations
from thrifty.techniques.memory.offload_activations import OffloadActivations
from thrifty.techniques.memory.optimal_recompute import OptimalRecompute
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.optimizers.sgd import Sgd

DEPTH, WIDTH, HEADS, LENGTH, BATCH = 12, 256, 4, 256, 4
BUDGETS = (0.7, 0.5, 0.3)
ROUNDS = 4
PLAIN, PLANS = "nothing", ("plan", "plan with 4 bits")


@dataclass(frozen=True)
class Point:
    """Measured memory and time of one technique."""

    way: str
    memory: int
    """Bytes at the peak."""
    ratios: tuple[float, ...] = (1.0,)
    """CPU time of a step relative to the plain step, per round."""
    by_the_wall: tuple[float, ...] = (1.0,)
    """Wall time of a step relative to the plain step, per round."""

    @property
    def slowdown(self) -> float:
        return median(self.ratios)

    @property
    def kind(self) -> str:
        return self.way.partition(",")[0]

    def beats(self, other: "Point") -> bool:
        """True if this is better in memory or time, and no worse in the other."""
        mine, theirs = (self.memory, self.slowdown), (other.memory, other.slowdown)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def plain_run() -> BaseRun:
    def build() -> nn.Module:
        model = assemble(ModelConfig("gpt", DEPTH, WIDTH, HEADS, HEADS, 4 * WIDTH, BYTES, LENGTH, tied=True))
        initialize(model, 0)
        return model

    return BaseRun(build, PackedTokens(source_text()[0], LENGTH, BATCH, seed=0), NextToken())


def ways() -> dict[str, Technique]:
    """Return the techniques by name; the part before the comma is the kind. Plans combine recompute, offload and
    compression."""
    techniques: dict[str, Technique] = {
        "recompute, every block": Recompute(),
        "recompute, selective": Recompute(schedule="selective"),
        "recompute, sqrt": Recompute(schedule="sqrt"),
        "offload, to disk": OffloadActivations(to="disk"),
        "compress, 8 bits": CompressActivations(bits=8),
        "compress, 4 bits": CompressActivations(bits=4),
        "compress, 2 bits": CompressActivations(bits=2),
    }
    for share in BUDGETS:
        techniques[f"optimal recompute, {share:.0%}"] = OptimalRecompute(bytes=share)
        techniques[f"{PLANS[0]}, {share:.0%}"] = ActivationBudget(bytes=share, offload="disk")
        techniques[f"{PLANS[1]}, {share:.0%}"] = ActivationBudget(bytes=share, offload="disk", bits=4)
    return techniques


@contextmanager
def gradients_freed(model: nn.Module) -> Iterator[None]:
    """Free each gradient at once, so that only activations accumulate."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def peak_bytes(run: Run, model: nn.Module) -> int:
    batch = run.source.at(0)
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with gradients_freed(model), gc_disabled(), StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    return live.peak


def step_and_peak(plain: BaseRun, techniques: Sequence[Technique]) -> tuple[Callable[[], None], int]:
    run = compose(plain, [Sgd(), *techniques], 10)
    model, batch = run.build_model().train(), run.source.at(0)

    def step() -> None:
        run.backward(model, run.objective, batch)
        model.zero_grad()

    step()  # the first step makes the plan
    return step, peak_bytes(run, model)


def measured() -> list[Point]:
    plain = plain_run()
    torch.set_num_threads(1)
    plain_step, plain_peak = step_and_peak(plain, [])
    points = [Point(PLAIN, plain_peak)]
    print(f"{DEPTH} blocks of width {WIDTH}, {BATCH} x {LENGTH} tokens, torch {torch.__version__}, {ROUNDS} rounds")
    print(f"  {'':<24} {'peak memory':>19}   {'CPU time':<22}   wall clock")
    for name, technique in ways().items():
        step, peak = step_and_peak(plain, [technique])
        points.append(Point(name, peak, *alternate(plain_step, step)))
        print_point(points[-1], plain_peak)
    return points


def alternate(plain_step: Callable[[], None], step: Callable[[], None]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the ratio of the step's CPU time and wall time to the plain step's, per round, in alternating order."""
    clocks = time.process_time, time.perf_counter
    ratios = []
    for turn in range(ROUNDS):
        taken = {}
        for each in (plain_step, step) if turn % 2 else (step, plain_step):
            began = [clock() for clock in clocks]
            each()
            taken[each] = [clock() - start for clock, start in zip(clocks, began, strict=True)]
        ratios.append([mine / theirs for mine, theirs in zip(taken[step], taken[plain_step], strict=True)])
    processor, wall = zip(*ratios, strict=True)
    return processor, wall


def print_point(point: Point, plain_peak: int) -> None:
    times = "   ".join(f"{median(r):6.3f} [{min(r):.3f}, {max(r):.3f}]" for r in (point.ratios, point.by_the_wall))
    print(f"  {point.way:<24} {point.memory / 1e6:8.1f} MB {point.memory / plain_peak:7.1%}   {times}", flush=True)


def front_of(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, ordered by memory."""
    return sorted((p for p in points if not any(other.beats(p) for other in points)), key=lambda p: p.memory)


def verdicts(points: Sequence[Point]) -> list[str]:
    """Compare each plan with the best single technique whose peak is within the plan's budget.

    Exact plans are compared with exact techniques only.
    """
    lines = []
    for plan in (point for point in points if point.kind in PLANS):
        budget = float(plan.way.partition(", ")[2].rstrip("%")) / 100 * points[0].memory
        others = [point for point in points if point.kind not in PLANS and point.memory <= budget]
        if plan.kind == PLANS[0]:
            others = [point for point in others if point.kind != "compress"]
        best = min(others, key=lambda point: point.slowdown)
        word = "slower than"
        if plan.slowdown <= best.slowdown:
            word = "no slower than"
        elif min(plan.ratios) <= max(best.ratios):
            word = "within the spread of"
        lines.append(f"{plan.way}: {plan.slowdown:.3f}, {word} {best.way} ({best.slowdown:.3f})")
    return lines


COLOURS = {
    PLAIN: "#555555",
    "recompute": "#4c78a8",
    "optimal recompute": "#2a9d8f",
    "offload": "#c8860d",
    "compress": "#e45756",
    PLANS[0]: "#54a24b",
    PLANS[1]: "#b279a2",
}


def heights_of_names(points: Sequence[Point]) -> dict[str, float]:
    """Return the height of each label: next to its dot, or above it to avoid overlap."""
    apart = 0.03 * (max(max(point.ratios) for point in points) - min(min(point.ratios) for point in points))
    placed: dict[Point, float] = {}
    for point in sorted(points, key=lambda point: point.slowdown):
        near = [placed[other] for other in placed if abs(other.memory - point.memory) < 0.22 * points[0].memory]
        height = point.slowdown
        while any(abs(height - taken) < apart for taken in near):
            height += apart / 8
        placed[point] = height
    return {point.way: height for point, height in placed.items()}


def plot(path: Path, points: Sequence[Point]) -> None:
    """Plot memory against slowdown: a point per technique, and a line through the Pareto front."""
    front, heights = front_of(points), heights_of_names(points)
    rows = [
        {"way": point.way, "kind": point.kind, "share": point.memory / points[0].memory, "slowdown": point.slowdown}
        | {"low": min(point.ratios), "high": max(point.ratios), "front": point in front, "height": heights[point.way]}
        for point in points
    ]
    shown = altair.Chart(altair.Data(values=rows)).encode(
        altair.X("share:Q", title="peak activations, relative to saving all")
        .axis(format="%", tickCount=10)
        .scale(domain=[0.05, 1.1]),
        altair.Y("slowdown:Q", title="CPU time of a step, relative to the plain step").scale(
            domainMin=0.98 * min(row["low"] for row in rows), nice=False
        ),
    )
    kinds = altair.Color("kind:N", title=None).scale(domain=list(COLOURS), range=list(COLOURS.values()))
    line = shown.transform_filter("datum.front").mark_line(color="#bbbbbb", strokeWidth=2, interpolate="step-after")
    spreads = shown.mark_rule(opacity=0.35).encode(altair.Y("low:Q"), altair.Y2("high:Q"), kinds)
    dots = shown.mark_point(filled=True, size=80, opacity=1).encode(kinds)
    names = shown.mark_text(align="left", dx=9, dy=-7, fontSize=11).encode(
        altair.Y("height:Q"), altair.Text("way:N"), kinds
    )
    title = altair.Title(
        f"Memory against time, {DEPTH} blocks of width {WIDTH}, {BATCH} x {LENGTH} tokens",
        subtitle="grey line: Pareto front; bars: minimum and maximum over rounds",
        anchor="start",
    )
    chart = (line + spreads + dots + names).properties(width=820, height=520, title=title)
    chart.configure_legend(disable=True).configure_axis(gridOpacity=0.4).save(path, ppi=110)


def main() -> None:
    points = measured()
    print("\nPareto front of memory and time")
    for point in front_of(points):
        print_point(point, points[0].memory)
    print("\nplans against the best single technique within the same budget", *verdicts(points), sep="\n  ")
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        shape = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "length": LENGTH, "batch": BATCH, "rounds": ROUNDS}
        table = [asdict(point) | {"slowdown": point.slowdown} for point in points]
        facts = {
            "benchmark": "activations",
            "shape": shape,
            "ways": table,
            "front": [point.way for point in front_of(points)],
        }
        write(path, facts | {"verdicts": verdicts(points)})
        plot(path.with_suffix(".png"), points)


if __name__ == "__main__":
    main()
