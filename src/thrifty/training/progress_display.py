"""Progress of a run on standard error: one live line on a terminal, otherwise a plain line every 10 seconds.

Before the first step, the line shows the current phase of the start. The first step prints how long each phase took.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from thrifty.core.errors import STARTED
from thrifty.core.plain_values import write_size
from thrifty.core.ranks import rank

BAR = (8, 40)
"""Least and largest width of the progress bar in characters."""
SHORT = 0.1
"""Seconds; shorter phases of the start are not printed."""


@dataclass(frozen=True)
class StepProgress:
    """The values of the progress line. `of_peak` is the achieved fraction of the machine's measured matmul FLOP/s in
    `number_format`; None if unknown."""

    step: int
    steps: int
    loss: float
    held_out: float | None
    evaluated_step: int | None
    """Step after which `held_out` and `measured` were evaluated."""
    tokens_per_second: float
    of_peak: float | None
    memory: float
    """Bytes in use: allocated on a GPU, resident in the process on a CPU."""
    predicted_memory: float | None
    """Predicted peak of `memory`."""
    seconds_left: float | None
    """Expected time until the end; None after a step that may include compilation."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics on held-out data in addition to the loss, by name."""
    unit: str = "tokens"
    """Unit of examples, such as tokens or images."""
    number_format: str = "float32"
    used: tuple[float, float] | None = None
    """Used seconds and all seconds of a budget in seconds."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line that fits the terminal: the time left, a bar, and as many parts as there is room for."""
        left, *rest = parts(self)
        room = options.max_width - len(left) - BAR[0] - 2
        while rest and len(" · ".join(rest)) > room:
            rest.pop()
        text = " · ".join(rest)
        done, whole = self.used or (self.step, self.steps)
        bar = ProgressBar(whole, done, width=min(BAR[1], options.max_width - len(left) - len(text) - 2))
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(left, "bold", no_wrap=True), bar, Text(text, no_wrap=True))
        yield line


def parts(p: StepProgress) -> list[str]:
    """Return the parts of the progress line, most important first."""
    left = "-:--" if p.seconds_left is None else duration(p.seconds_left)
    texts = [f"{left} left", f"step {p.step:,}/{p.steps:,}", f"loss {p.loss:.3f}"]
    if p.held_out is not None:
        measured = "".join(f", {name} {value:.4g}" for name, value in p.measured.items())
        when = "" if p.evaluated_step == p.step else f" after step {p.evaluated_step:,}"
        texts.append(f"held-out {p.held_out:.3f}{measured}{when}")
    if p.used is not None:
        texts.append("used {:.0f} of {:.0f} s".format(*p.used))
    texts.append(f"{p.tokens_per_second:,.0f} {p.unit}/s")
    predicted = f" (predicted peak {write_size(p.predicted_memory)})" if p.predicted_memory else ""
    texts.append(f"memory {write_size(p.memory)}{predicted}")
    if p.of_peak is not None:
        texts.append(f"{p.of_peak:.0%} of {p.number_format} peak")
    return texts


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@dataclass(frozen=True)
class StartPhase:
    """Phase of the start of a run, such as "opening the data"."""

    text: str
    began: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Spinner("line", f"{self.text} · {duration(time.monotonic() - self.began)}")


class ProgressDisplay:
    """Printer of progress; quiet ranks print nothing. `update` may be called at every step."""

    def __init__(self, quiet: bool = False, every: float = 10.0):
        self.console = Console(stderr=True, quiet=quiet or rank() > 0, highlight=False)
        self.every, self.quiet = every, quiet
        now = time.monotonic()
        self._began = self._last = min(float(os.environ.get(STARTED, now)), now)
        self._phases = [StartPhase("loading PyTorch", self._began)]
        self._is_started = False
        self._live = Live(console=self.console, refresh_per_second=4, transient=False) if self.live else None

    @property
    def live(self) -> bool:
        return self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.quiet

    def __enter__(self) -> "ProgressDisplay":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            if not self._is_started:
                self._live.update(Text())
            self._live.stop()

    def phase(self, text: str) -> None:
        """Show the current phase of the start. Without a terminal, print only phases of a slow start."""
        now = time.monotonic()
        self._phases.append(StartPhase(text, now))
        if self._live:
            self._live.update(self._phases[-1], refresh=True)
        elif now - self._last >= self.every:
            self._last = now
            self.say(f"{text} …")

    def started(self) -> None:
        """Print the duration of the start and of its phases, once."""
        if self._is_started:
            return
        self._is_started, now = True, time.monotonic()
        self._last = -float("inf")  # print the first step too
        ends = [*(phase.began for phase in self._phases[1:]), now]
        spans = [(phase.text, end - phase.began) for phase, end in zip(self._phases, ends, strict=True)]
        named = ", ".join(f"{text} {seconds:.1f} s" for text, seconds in spans if seconds >= SHORT)
        self.say(f"first step after {now - self._began:.1f} s" + (f": {named}" if named else ""))

    def update(self, progress: StepProgress, now: bool = False) -> None:
        if self._live:
            self._live.update(progress)
        elif now or time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            self.say(" · ".join(parts(progress)))

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def answer(self, text: str) -> None:
        """Print a text that answers a user's signal, also if the display is quiet."""
        (Console(stderr=True, highlight=False) if self.quiet and rank() == 0 else self.console).print(
            text, soft_wrap=True, markup=False
        )
