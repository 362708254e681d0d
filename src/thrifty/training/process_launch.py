"""Commands and environment variables that start a Python process as one or several ranks."""

import sys

from thrifty.machine.cpu_features import usable_cores


def python(ranks: int) -> list[str]:
    """Return the command before `-m MODULE ARGUMENTS`; several ranks are started by torchrun."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "thrifty.training.local_torchrun", f"--nproc-per-node={ranks}"]


def settings(ranks: int) -> dict[str, str]:
    """Return environment variables for this many ranks on one machine: each gets an equal part of the cores.
    torchrun itself would limit each rank to one core."""
    return {} if ranks == 1 else {"OMP_NUM_THREADS": str(max(len(usable_cores()) // ranks, 1))}


def launch_command(ranks: int, options: str = "") -> str:
    """Return the start of the command that trains on this many ranks with these options."""
    return f"thrifty train{options}" + (f" --ranks {ranks}" if ranks > 1 else "")
