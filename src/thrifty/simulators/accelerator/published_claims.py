"""What was published about accelerators, and what is simulated here for the same: `published.toml` row by row, and
`published_elsa.toml` bar by bar."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import numpy as np

from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate, simulate_product
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.designs.outerspace import traffic
from thrifty.simulators.accelerator.designs.sanger import released_seconds
from thrifty.simulators.accelerator.designs.vitcod import released_linear_cycles
from thrifty.simulators.accelerator.published_elsa import elsa_bars
from thrifty.simulators.accelerator.spgemm_workload import uniform
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace


@dataclass(frozen=True)
class PublishedClaim:
    """A published figure and ours."""

    name: str
    paper: str
    place: str
    quantity: str
    published: float
    grade: str
    gap: str
    """Why ours differs, or what the published figure is not."""
    figure: str = ""
    """The figure of which this is a bar."""

    def simulate(self) -> float:
        return OURS[self.name]()


def claims() -> list[PublishedClaim]:
    """All of them, as they stand in the files."""
    text = (files("thrifty.simulators.accelerator") / "published.toml").read_text(encoding="utf-8")
    bars = [
        PublishedClaim(bar.name, "ELSA (ISCA 2021)", bar.place, bar.quantity, bar.published, "P", bar.gap, bar.figure)
        for bar in elsa_bars()
    ]
    return [PublishedClaim(name, **row) for name, row in tomllib.loads(text).items()] + bars


def _elsa(pattern: str, density: float, tokens: int, approximate: bool) -> float:
    """Cycles over those of 528 multipliers that always have something to do, without preprocessing."""
    machine = find_machine("elsa").replaced("approximate", approximate)
    result = simulate(machine, synthetic_trace(pattern, density, heads=1, tokens=tokens))
    before = 3 * (tokens + 1) if approximate else 0
    return (result.cycles - before) / (2 * tokens**2 * 64 / 528)


def _a3(figure: Callable[[int, int], float]) -> float:
    """Of the cycles of one query and of 320 over 320 keys."""
    machine = find_machine("a3").replaced("approximate", False)
    result = simulate(machine, synthetic_trace("uniform", 0.5, heads=1, tokens=320), draw=True)
    example = result.layers[0].example
    assert example is not None
    return figure(int(example.latency[0]), result.cycles)


def _a3_pace(iterations: float, candidates: float, tokens: int = 320) -> float:
    """Cycles from one query to the next in the steady state, with the published share of candidates."""
    plain = synthetic_trace("balanced", 0.04, heads=1, tokens=tokens).layers[0]
    counts = {"candidates": np.full((1, 1, tokens), round(candidates * tokens))}
    trace = AttentionTrace("bert", (plain.masked(plain.kept()[None], counts),))
    result = simulate(find_machine("a3").replaced("iterations", iterations), trace, draw=True)
    example = result.layers[0].example
    assert example is not None
    ends = example.end[-1, 0, tokens // 2 :]
    return float(ends[-1] - ends[0]) / (len(ends) - 1)


def _rate(design: str) -> float:
    """Gop/s as if all pairs were computed, of one mask, at 128 multipliers and 1 GHz."""
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
    **{bar.name: bar.simulate for bar in elsa_bars()},
}
