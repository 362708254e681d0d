"""Published figures of accelerators, and simulations of these figures.

Figures are rows of `published.toml` and bars of `published_elsa.toml`. ELSA's paper prints kept fractions, but no
masks. The simulated masks keep runs of neighboring keys, which load the banks about evenly. Random masks of scattered
pairs take 15 to 20 % longer."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np

from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate, simulate_product
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.designs.outerspace import traffic
from thrifty.simulators.accelerator.designs.sanger import released_seconds
from thrifty.simulators.accelerator.designs.vitcod import released_linear_cycles
from thrifty.simulators.accelerator.spgemm_workload import uniform
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

BASE, MODES = "base", ("conservative", "moderate", "aggressive")
P = (0.5, 1, 2, 4)
"""Values of ELSA's parameter p for which the paper prints kept fractions."""
COPIES, WATTS, MULTIPLIERS = 12, 250, 528
"""Number of ELSA accelerators per GPU, power of the GPU in W, and multipliers of ELSA's ideal accelerator."""


@dataclass(frozen=True)
class PublishedClaim:
    """A published figure that can be simulated."""

    name: str
    paper: str
    place: str
    quantity: str
    published: float
    grade: str
    gap: str
    """Reason for the difference between simulated and published value, or a condition of the published value."""
    figure: str = ""
    """Name of the chart that contains the bar; empty for claims that are not bars."""

    def simulate(self) -> float:
        return OURS[self.name]()


def claims() -> list[PublishedClaim]:
    """Return all published figures, in the order of the files."""
    rows = [PublishedClaim(name, **row) for name, row in _packaged("published.toml").items()]
    return rows + [claim for claim, _ in _elsa_bars()]


def _packaged(name: str) -> dict[str, Any]:
    return tomllib.loads((files("thrifty.simulators.accelerator") / name).read_text(encoding="utf-8"))


def _elsa_bars() -> Iterator[tuple[PublishedClaim, Callable[[], float]]]:
    """Yield each bar of ELSA's charts with its simulation: latency in three modes, and energy in the base mode and two
    modes."""
    for row in _packaged("published_elsa.toml")["workload"]:
        kept = {mode: (p, row["kept"][P.index(p)]) for mode, p in zip(MODES, row["p"], strict=True)}
        kept[BASE] = (0.0, 1.0)
        for place, what, modes, published, speedup in (
            ("figure 11b", "latency over ideal", MODES, row["latency"], None),
            ("figure 13a", "energy of a V100 over its own", (BASE, *MODES[:2]), row["energy"], row["speedup"]),
        ):
            for mode, value in zip(modes, published, strict=True):
                (p, share), figure = kept[mode], f"{what}, {mode}"
                gap = "masks are unpublished; the simulated masks keep runs of neighbors at the kept fraction of p"
                if mode == BASE:
                    gap = "none: active power of the modules, a GPU of 250 W, and the published speedup"
                bar = f"{figure}, {row['name']}"
                quantity = f"{bar} (p = {p:g})" if p else bar
                claim = PublishedClaim(f"elsa, {bar}", "ELSA (ISCA 2021)", place, quantity, value, "P", gap, figure)
                yield claim, partial(_elsa_bar, mode, row["tokens"], share, speedup)


def _elsa_bar(mode: str, tokens: int, kept: float, speedup: float | None) -> float:
    """Return the cycles without preprocessing, divided by the cycles of an ideal accelerator.

    With `speedup`, return the energy of a V100 divided by the energy of ELSA. `speedup` is the speed of ELSA's base
    version divided by the speed of a V100.
    """
    elsa, trace = find_machine("elsa"), synthetic_trace("runs", kept, heads=1, tokens=tokens)
    base = simulate(elsa.replaced("approximate", False), trace)
    result = base if mode == BASE else simulate(elsa, trace)
    if speedup is None:
        return (result.cycles - 3 * (tokens + 1)) / (2 * tokens**2 * 64 / MULTIPLIERS)
    energy = result.energy("activity")
    assert energy is not None
    return WATTS * speedup * base.seconds / COPIES / energy.total


def _elsa(pattern: str, density: float, tokens: int, approximate: bool) -> float:
    """Return the cycles without preprocessing, divided by the cycles that always busy multipliers would take."""
    machine = find_machine("elsa").replaced("approximate", approximate)
    result = simulate(machine, synthetic_trace(pattern, density, heads=1, tokens=tokens))
    before = 3 * (tokens + 1) if approximate else 0
    return (result.cycles - before) / (2 * tokens**2 * 64 / MULTIPLIERS)


def _a3(figure: Callable[[int, int], float]) -> float:
    """Return `figure(a, b)`, where a is the cycles of one query and b the cycles of 320 queries, at 320 keys."""
    machine = find_machine("a3").replaced("approximate", False)
    result = simulate(machine, synthetic_trace("uniform", 0.5, heads=1, tokens=320), draw=True)
    example = result.layers[0].example
    assert example is not None
    return figure(int(example.latency[0]), result.cycles)


def _a3_pace(iterations: float, candidates: float, tokens: int = 320) -> float:
    """Return the cycles per query in the steady state, at the published fraction of candidates."""
    plain = synthetic_trace("balanced", 0.04, heads=1, tokens=tokens).layers[0]
    counts = {"candidates": np.full((1, 1, tokens), round(candidates * tokens))}
    trace = AttentionTrace("bert", (plain.masked(plain.kept()[None], counts),))
    result = simulate(find_machine("a3").replaced("iterations", iterations), trace, draw=True)
    example = result.layers[0].example
    assert example is not None
    ends = example.end[-1, 0, tokens // 2 :]
    return float(ends[-1] - ends[0]) / (len(ends) - 1)


def _rate(design: str) -> float:
    """Return the throughput on a power-law mask in Gop/s, with 128 multipliers at 1 GHz. All pairs count as
    computed."""
    machine = limit_resources(find_machine(design), multipliers=128, clock=1e9)
    return simulate(machine, synthetic_trace("power-law", 0.2, heads=4, tokens=384)).dense_rate / 1e9


def _outerspace(rows: int, density: float) -> float:
    return 1e3 * simulate_product(find_machine("outerspace"), uniform(rows, density)).seconds


def _traffic(rows: int, density: float) -> float:
    moved = traffic(uniform(rows, density), find_machine("outerspace"))
    return sum(moved.values()) / (moved["A"] + moved["B"] + moved["Z"])


OURS: dict[str, Callable[[], float]] = {
    "elsa_base": partial(_elsa, "uniform", 0.5, 512, False),
    "elsa_bert": partial(_elsa, "uniform", 0.274, 206, True),
    "a3_period": partial(_a3, lambda latency, cycles: (cycles - latency) / 319),
    "a3_latency": partial(_a3, lambda latency, cycles: latency),
    "a3_conservative": partial(_a3_pace, 1 / 2, 0.205),
    "a3_aggressive": partial(_a3_pace, 1 / 8, 0.093),
    "sanger_model_1": lambda: 1e3 * released_seconds(0.15, 0.75, 384, version=1),
    "sanger_model_2": lambda: 1e3 * released_seconds(0.15, 0.75, 384, version=2),
    "sanger_rate": partial(_rate, "sanger"),
    "spatten_rate": partial(_rate, "spatten"),
    "a3_rate": partial(_rate, "a3"),
    "spatten_area": lambda: find_machine("spatten").area or 0.0,
    "vitcod_linear": lambda: sum(released_linear_cycles(197, heads=3, layers=12)),
    "outerspace_4986": partial(_outerspace, 4986, 8e-3),
    "outerspace_9987": partial(_outerspace, 9987, 2e-3),
    "outerspace_19937": partial(_outerspace, 19937, 5e-4),
    "outerspace_39888": partial(_outerspace, 39888, 1.3e-4),
    "outerspace_79730": partial(_outerspace, 79730, 3.1e-5),
    "outerspace_traffic": partial(_traffic, 4986, 8e-3),
    **{claim.name: simulation for claim, simulation in _elsa_bars()},
}
