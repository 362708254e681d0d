"""thrifty doctor: what this machine can do for training, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from thrifty.reporting.number_format import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from thrifty.machine.machine_info import CompileTrial, MachineInfo
    from thrifty.machine.measured_rates import MeasuredRate

OLDEST_TORCH = (2, 11)
LITTLE_DISK = 5e9
LITTLE_MEMORY = 2e9
NO_GAIN = 1.2
"""bfloat16 products less than this many times as fast as float32 ones do not pay for the casts."""


@dataclass(frozen=True)
class DoctorFinding:
    what: str
    fix: str
    fatal: bool = False
    """Whether training cannot work at all."""


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quick", is_flag=True, help="About one second: memory and disk are not measured.")
@click.option("--compile", "with_compile", is_flag=True, help="Also compile a small function, to see that it works.")
@click.option(
    "--sparse", multiple=True, metavar="OUTxIN", help="Also from which density on products of such a layer pay sparse."
)
def command(as_json: bool, quick: bool, with_compile: bool, sparse: tuple[str, ...]) -> None:
    """What this machine can do, measured, and what is missing.

    Exit code 1 only where training cannot work at all; 0 otherwise, whatever optional part is missing.
    """
    from rich.console import Console

    from thrifty.cli.verb_output import print_result
    from thrifty.machine.machine_info import probe, try_compile
    from thrifty.planning.breakeven_table import crossover_table

    shapes = [_shape(text) for text in sparse]
    machine = probe(quick)
    trial = try_compile() if with_compile else None
    findings = diagnose(machine, runs_writable(), trial)
    rows = list(crossover_table(shapes, dtypes=("float32", "bfloat16")))
    facts = {
        "machine": asdict(machine) | {"cores": machine.cores},
        "compile": None if trial is None else asdict(trial),
        "findings": [asdict(finding) for finding in findings],
        "sparse": [asdict(row) | {"crossover": row.crossover} for row in rows],
    }

    def words() -> str | None:
        print_findings(Console(highlight=False), machine, trial, findings)
        return "\n".join(map(str, rows)) or None

    print_result(facts, words, as_json)
    raise SystemExit(1 if any(finding.fatal for finding in findings) else 0)


def _shape(text: str) -> tuple[int, int]:
    """The rows and columns of a weight, as in 4096x1024."""
    from thrifty.core.errors import UsageError

    sizes = text.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise UsageError(
            f"--sparse {text} is no shape of a weight", fix="outputs and inputs, such as --sparse 4096x1024"
        )
    return int(sizes[0]), int(sizes[1])


def runs_writable() -> bool:
    """Whether a run folder can be made under ./runs."""
    import tempfile
    from pathlib import Path

    folder = Path("runs") if Path("runs").exists() else Path()
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def diagnose(machine: MachineInfo, writable: bool, trial: CompileTrial | None) -> list[DoctorFinding]:
    """Everything worth telling, the fatal first, each with what to do."""
    return [*_fatal(machine, writable), *_compiler(machine, trial), *_resources(machine), *_optional(machine)]


def _fatal(machine: MachineInfo, writable: bool) -> Iterator[DoctorFinding]:
    version = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        yield DoctorFinding(f"torch {machine.torch} is too old", f'pip install "torch>={needed}"', fatal=True)
    if not writable:
        what = "no run folder can be written under ./runs"
        yield DoctorFinding(what, "work in a folder you may write to", fatal=True)


def _compiler(machine: MachineInfo, trial: CompileTrial | None) -> Iterator[DoctorFinding]:
    needs = "the techniques `compile` and `attention.tiled` need it on a CPU"
    if machine.compiler is None:
        fix = "install g++ (Debian: apt-get install g++), or set CXX to yours"
        yield DoctorFinding(f"no C++ compiler: {needs}", fix)
    elif not machine.python_headers:
        fix = "install them (Debian: apt-get install python3-dev)"
        yield DoctorFinding(f"Python's C headers are missing: {needs}", fix)
    elif trial is not None and not trial.works:
        yield DoctorFinding(f"torch.compile fails here: {trial.message}", "train with `--without compile`")


def _resources(machine: MachineInfo) -> Iterator[DoctorFinding]:
    if not machine.gpus and _gain(machine) < NO_GAIN:
        yield DoctorFinding(
            f"bfloat16 products run at {_gain(machine):.2f} times the float32 rate on this CPU",
            "leave out `precision.mixed`: it gains nothing here",
        )
    if any(rate.median < rate.high / 2 for rate in machine.matmul.values()):
        yield DoctorFinding(
            "the same matrix product takes more than twice as long at times: other programs use these cores",
            "measure again when the machine is quiet; until then training is slowed down as much",
        )
    if machine.core_quota is not None and machine.core_quota < machine.logical_cores:
        yield DoctorFinding(
            f"{machine.logical_cores} cores are visible, but the control group grants {machine.core_quota:g}",
            f"set OMP_NUM_THREADS={max(1, round(machine.core_quota))}: more threads only wait for each other",
        )
    if machine.memory_available < LITTLE_MEMORY:
        available = scaled(machine.memory_available, "B")
        yield DoctorFinding(f"only {available} of memory is free", "close other programs, or train a smaller preset")
    if machine.disk_free < LITTLE_DISK:
        free = scaled(machine.disk_free, "B")
        yield DoctorFinding(f"only {free} is free on this disk", "free some, or keep fewer checkpoints")


def _optional(machine: MachineInfo) -> Iterator[DoctorFinding]:
    for extra, modules in machine.missing_extras.items():
        what = f"extra `{extra}` is not installed ({', '.join(modules)})"
        yield DoctorFinding(what, f'pip install "thrifty[{extra}]"')
    if "gloo" not in machine.backends:
        what = "torch has no gloo backend: no training on several CPU ranks"
        yield DoctorFinding(what, "install an official torch wheel")
    if machine.gpus and "nccl" not in machine.backends:
        what = "torch has no NCCL backend: GPUs cannot train together"
        yield DoctorFinding(what, "install torch for CUDA on Linux")


def _gain(machine: MachineInfo) -> float:
    """How many times as fast bfloat16 products are, by the best repeat of each: others may use the machine too."""
    return machine.matmul["bfloat16"].high / machine.matmul["float32"].high


def print_findings(
    console: Console, machine: MachineInfo, trial: CompileTrial | None, findings: list[DoctorFinding]
) -> None:
    from rich.markup import escape

    _show_table(console, "Machine", _machine_rows(machine))
    _show_table(console, "Measured: median (slowest to fastest repeat)", _rate_rows(machine))
    _show_table(console, "Software", _software_rows(machine, trial))
    if not findings:
        console.print("\n[green]Nothing is missing.[/green]")
    for finding in findings:
        mark = "[red]cannot train[/red]" if finding.fatal else "[yellow]note[/yellow]"
        console.print(f"\n{mark}  {escape(finding.what)}\n      {escape(finding.fix)}", soft_wrap=True)


def _show_table(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=18)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print()
    console.print(table)


def _machine_rows(machine: MachineInfo) -> list[tuple[str, str]]:
    quota = f", {machine.core_quota:g} granted" if machine.core_quota is not None else ""
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
    rows = [(f"{dtype} products", _rate(rate, "FLOP/s")) for dtype, rate in machine.matmul.items()]
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
