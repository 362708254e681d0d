"""`doctor`: measure this machine for training, and report what is missing."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from thrifty.machine.machine_info import CompileTrial, MachineInfo, probe, try_compile
from thrifty.machine.measured_rates import MeasuredRate
from thrifty.planning.breakeven_table import BreakevenRow, crossover_table
from thrifty.reporting.number_format import scaled
from thrifty.reporting.printed_result import PrintedResult, lines

OLDEST_TORCH = (2, 11)
LITTLE_DISK = 5e9
LITTLE_MEMORY = 2e9
NO_GAIN = 1.2
"""Minimum ratio of bfloat16 to float32 matmul speed at which casts pay off."""


@dataclass(frozen=True)
class DoctorFinding:
    what: str
    fix: str
    fatal: bool = False
    """True if training is impossible."""


@dataclass(frozen=True, repr=False)
class MachineReport(PrintedResult):
    """Measured speeds of this machine for training, and missing software or resources."""

    machine: MachineInfo
    findings: tuple[DoctorFinding, ...]
    trial: CompileTrial | None = None
    sparse: tuple[BreakevenRow, ...] = ()

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 1 if any(finding.fatal for finding in self.findings) else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.machine) | {"cores": self.machine.cores},
            "compile": None if self.trial is None else asdict(self.trial),
            "findings": [asdict(finding) for finding in self.findings],
            "sparse": [asdict(row) | {"crossover": row.crossover} for row in self.sparse],
        }

    def __rich__(self) -> RenderableType:
        tables = [
            _titled("Machine", _machine_rows(self.machine)),
            _titled("Measured: median (slowest to fastest repeat)", _rate_rows(self.machine)),
            _titled("Software", _software_rows(self.machine, self.trial)),
        ]
        printed = [Text.from_markup("\n[green]Nothing is missing.[/green]")] if not self.findings else []
        for finding in self.findings:
            mark = "[red]cannot train[/red]" if finding.fatal else "[yellow]note[/yellow]"
            printed.append(Text.from_markup(f"\n{mark}  {escape(finding.what)}\n      {escape(finding.fix)}"))
        return lines(*tables, *printed, *map(str, self.sparse))


def doctor(*, quick: bool = False, compile: bool = False, sparse: Sequence[tuple[int, int]] = ()) -> MachineReport:
    """Measure the speed of this machine for training, and report missing software and resources.

    Args:
        quick: True to skip the measurements of memory and disk.
        compile: True to test torch.compile on a small function.
        sparse: Weight shapes (outputs, inputs). For each shape, measure the density below which sparse matmuls are
            faster.

    Example::

        report = thrifty.doctor(quick=True)
        print(report, report.findings)
    """
    machine = probe(quick)
    trial = try_compile() if compile else None
    rows = crossover_table(sparse, dtypes=("float32", "bfloat16"))
    return MachineReport(machine, tuple(diagnose(machine, runs_writable(), trial)), trial, tuple(rows))


def runs_writable() -> bool:
    """Return True if a run folder can be created under ./runs."""
    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def diagnose(machine: MachineInfo, writable: bool, trial: CompileTrial | None) -> list[DoctorFinding]:
    """Return all findings, fatal ones first, each with its fix."""
    return [*_fatal(machine, writable), *_compiler(machine, trial), *_resources(machine), *_optional(machine)]


def _fatal(machine: MachineInfo, writable: bool) -> Iterator[DoctorFinding]:
    version = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield DoctorFinding(f"torch {machine.torch} is too old", f'pip install "torch>={needed}"', fatal=True)
    if not writable:
        what = "no run folder can be created in './runs'"
        yield DoctorFinding(what, "change to a writable folder", fatal=True)


def _compiler(machine: MachineInfo, trial: CompileTrial | None) -> Iterator[DoctorFinding]:
    needs = "the techniques `compile` and `attention.tiled` require it on a CPU"
    if machine.compiler is None:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to your compiler"
        yield DoctorFinding(f"no C++ compiler: {needs}", fix)
    elif not machine.python_headers:
        fix = "install them (Debian: apt-get install python3-dev)"
        yield DoctorFinding(f"Python's C headers are missing: {needs}", fix)
    elif trial is not None and not trial.works:
        yield DoctorFinding(f"torch.compile fails here: {trial.message}", "train with `--without compile`")


def _resources(machine: MachineInfo) -> Iterator[DoctorFinding]:
    if not machine.gpus and _gain(machine) < NO_GAIN:
        yield DoctorFinding(
            f"bfloat16 matmuls run at {_gain(machine):.2f} times the float32 rate on this CPU",
            "leave out `precision.mixed`, which is not faster on this CPU",
        )
    if any(rate.median < rate.high / 2 for rate in machine.matmul.values()):
        yield DoctorFinding(
            "repeats of one matmul differ by more than a factor of 2: other programs use these cores",
            "stop other programs and measure again",
        )
    if machine.core_quota is not None and machine.core_quota < machine.logical_cores:
        yield DoctorFinding(
            f"{machine.logical_cores} cores are visible, but the control group (cgroup) allows {machine.core_quota:g}",
            f"set OMP_NUM_THREADS={max(1, round(machine.core_quota))}: more threads are not faster",
        )
    if machine.memory_available < LITTLE_MEMORY:
        available = scaled(machine.memory_available, "B")
        yield DoctorFinding(f"only {available} of memory is free", "close other programs; or train a smaller preset")
    if machine.disk_free < LITTLE_DISK:
        free = scaled(machine.disk_free, "B")
        yield DoctorFinding(f"only {free} is free on this disk", "delete files; or keep fewer checkpoints")


def _optional(machine: MachineInfo) -> Iterator[DoctorFinding]:
    if extras := machine.missing_extras:
        names = ", ".join(f"{extra} ({', '.join(modules)})" for extra, modules in extras.items())
        one = next(iter(extras))
        yield DoctorFinding(f"optional extras are not installed: {names}", f'pip install "thrifty[{one}]" installs one')
    if "gloo" not in machine.backends:
        what = "torch has no gloo backend, so several CPU ranks cannot train together"
        yield DoctorFinding(what, "install an official torch wheel")
    if machine.gpus and "nccl" not in machine.backends:
        what = "torch has no NCCL backend, so GPUs cannot train together"
        yield DoctorFinding(what, "install torch for CUDA on Linux")


def _gain(machine: MachineInfo) -> float:
    """Return the speed of bfloat16 matmuls relative to float32. The best repeat of each format counts, because other
    programs may slow some repeats.
    """
    return machine.matmul["bfloat16"].high / machine.matmul["float32"].high


def _titled(title: str, rows: list[tuple[str, str]]) -> RenderableType:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=18)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    return Group("", table)


def _machine_rows(machine: MachineInfo) -> list[tuple[str, str]]:
    quota = f", {machine.core_quota:g} allowed" if machine.core_quota is not None else ""
    gpus = [f"{gpu.name}, {scaled(gpu.memory, 'B')}, capability {gpu.capability}" for gpu in machine.gpus]
    return [
        ("processor", machine.cpu),
        ("cores", f"{machine.physical_cores} physical, {machine.logical_cores} logical{quota}"),
        ("instructions", f"{', '.join(machine.instructions) or 'unknown'}; torch uses {machine.torch_instructions}"),
        ("GPU", "\n".join(gpus) or "none"),
        ("memory", f"{scaled(machine.memory, 'B')}, {scaled(machine.memory_available, 'B')} free"),
        ("disk here", f"{scaled(machine.disk_free, 'B')} free"),
    ]


def _rate_rows(machine: MachineInfo) -> list[tuple[str, str]]:
    rows = [(f"{dtype} matmul", _rate(rate, "FLOP/s")) for dtype, rate in machine.matmul.items()]
    for gpu in machine.gpus:
        rows += [(f"{dtype} on {gpu.name}", _rate(rate, "FLOP/s")) for dtype, rate in gpu.matmul.items()]
    return [
        *rows,
        ("memory copy", _rate(machine.memory_rate, "B/s")),
        ("disk, flushed", _rate(machine.disk_rate, "B/s")),
    ]


def _rate(rate: MeasuredRate | None, unit: str) -> str:
    if rate is None:
        return "not measured"
    return f"{scaled(rate.median, unit)}  ({scaled(rate.low, unit)} to {scaled(rate.high, unit)})"


def _software_rows(machine: MachineInfo, trial: CompileTrial | None) -> list[tuple[str, str]]:
    compiles = "not tried (--compile)"
    if trial is not None:
        compiles = f"works, {trial.seconds:.0f} s for the first function" if trial.works else "fails"
    return [
        ("thrifty", machine.thrifty),
        ("torch", machine.torch),
        ("python", f"{machine.python} on {machine.platform}"),
        (
            "C++ compiler",
            f"{machine.compiler or 'none'}, Python headers {'found' if machine.python_headers else 'missing'}",
        ),
        ("torch.compile", compiles),
        ("distributed", ", ".join(machine.backends) or "none"),
    ]
