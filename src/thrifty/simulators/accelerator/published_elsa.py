"""ELSA's bars by workload, `published_elsa.toml`, and what is simulated for each.

The paper gives kept fractions and no masks. Ours keep runs of neighbouring keys, which load the banks about evenly;
masks of single pairs by chance take 15 to 20 % longer.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_simulation import simulate
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

BASE, MODES = "base", ("conservative", "moderate", "aggressive")
P = (0.5, 1, 2, 4)
"""At which kept fractions are published."""
COPIES, WATTS, MULTIPLIERS = 12, 250, 528
"""Accelerators against one GPU, the power of that, and what an ideal accelerator has."""


@dataclass(frozen=True)
class PublishedBar:
    """One bar of figure 11b or 13a."""

    workload: str
    mode: str
    published: float
    tokens: int
    p: float
    """Of the threshold; 0 for the base, which has none."""
    kept: float
    speedup: float | None
    """The base's over a V100, for a bar of energy; None for one of latency."""

    @property
    def figure(self) -> str:
        return f"{'latency over ideal' if self.speedup is None else 'energy of a V100 over its own'}, {self.mode}"

    @property
    def place(self) -> str:
        return "figure 11b" if self.speedup is None else "figure 13a"

    @property
    def name(self) -> str:
        return f"elsa, {self.figure}, {self.workload}"

    @property
    def quantity(self) -> str:
        return f"{self.figure}, {self.workload}" + (f" (p = {self.p:g})" if self.p else "")

    @property
    def gap(self) -> str:
        if self.mode == BASE:
            return "none: powers of modules at work, and a GPU of 250 W, at the published speedup"
        return "masks are not published: ours keep runs of neighbours, as many as at a measured p"

    def simulate(self) -> float:
        """Cycles over those of an ideal accelerator without preprocessing, or the ratio of energies."""
        elsa, trace = find_machine("elsa"), synthetic_trace("runs", self.kept, heads=1, tokens=self.tokens)
        base = simulate(elsa.replaced("approximate", False), trace)
        result = base if self.mode == BASE else simulate(elsa, trace)
        if self.speedup is None:
            return (result.cycles - 3 * (self.tokens + 1)) / (2 * self.tokens**2 * 64 / MULTIPLIERS)
        energy = result.energy("activity")
        assert energy is not None
        return WATTS * self.speedup * base.seconds / COPIES / energy.total


@cache
def elsa_bars() -> tuple[PublishedBar, ...]:
    """All bars: latency in three modes, energy of the base and in two modes."""
    text = (files("thrifty.simulators.accelerator") / "published_elsa.toml").read_text(encoding="utf-8")
    bars = []
    for row in tomllib.loads(text)["workload"]:
        kept = {mode: (p, row["kept"][P.index(p)]) for mode, p in zip(MODES, row["p"], strict=True)}
        kept[BASE] = (0.0, 1.0)
        for modes, published, speedup in (
            (MODES, row["latency"], None),
            ((BASE, *MODES[:2]), row["energy"], row["speedup"]),
        ):
            for mode, value in zip(modes, published, strict=True):
                bars.append(PublishedBar(row["name"], mode, value, row["tokens"], *kept[mode], speedup))
    return tuple(bars)
