"""Progress of a run: one live line on a terminal, otherwise a plain line every 10 seconds."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from thrifty.core.plain_values import write_size


@dataclass(frozen=True)
class StepProgress:
    """The values of the progress line. `of_peak` is the achieved fraction of the machine's measured matmul FLOP/s; None
    if unknown."""

    step: int
    steps: int
    loss: float
    held_out: float | None
    evaluated_step: int | None
    """Step after which `held_out` and `measured` were evaluated."""
    tokens_per_second: float
    of_peak: float | None
    memory: float
    """Tensor bytes on a GPU; bytes added to the process since the start on a CPU."""
    predicted_memory: float | None
    seconds_left: float
    measured: Mapping[str, float] = field(default_factory=dict)
    """Metrics on held-out data in addition to the loss, by name."""
    unit: str = "tokens"
    """Unit of examples, such as tokens or images."""
    process: float = 0.0
    """Bytes of the process before a run on a CPU, else 0."""


def line(p: StepProgress) -> str:
    parts = [f"step {p.step:,}/{p.steps:,}", f"loss {p.loss:.3f}"]
    if p.held_out is not None:
        measured = "".join(f", {name} {value:.4g}" for name, value in p.measured.items())
        when = "" if p.evaluated_step == p.step else f" after step {p.evaluated_step:,}"
        parts.append(f"held-out {p.held_out:.3f}{measured}{when}")
    parts.append(f"{p.tokens_per_second:,.0f} {p.unit}/s")
    if p.of_peak is not None:
        parts.append(f"{p.of_peak:.0%} of peak")
    if p.process:  # the process holds more than the predicted tensors
        parts.append(f"process {write_size(p.process + p.memory)}, grown by {write_size(p.memory)}")
    else:
        predicted = f" (predicted {write_size(p.predicted_memory)})" if p.predicted_memory else ""
        parts.append(f"{write_size(p.memory)}{predicted}")
    parts.append(f"{duration(p.seconds_left)} left")
    return " · ".join(parts)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class ProgressDisplay:
    """Printer of progress; quiet ranks print nothing. `update` may be called at every step."""

    def __init__(self, quiet: bool = False, every: float = 10.0):
        self.console = Console(stderr=True, quiet=quiet, highlight=False)
        self.every, self._last = every, -float("inf")
        self._live = Live(console=self.console, refresh_per_second=4, transient=False) if self.live else None

    @property
    def live(self) -> bool:
        return self.console.is_terminal and not self.console.quiet

    def __enter__(self) -> "ProgressDisplay":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, progress: StepProgress, now: bool = False) -> None:
        if self._live:
            self._live.update(Text(line(progress), overflow="ellipsis", no_wrap=True))
        elif now or time.monotonic() - self._last >= self.every:
            self._last = time.monotonic()
            self.say(line(progress))

    def say(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)
