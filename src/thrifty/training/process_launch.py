"""Commands and environment variables that start a Python process as one or several ranks."""

import sys

from thrifty.machine.cpu_features import usable_cores


def python(ranks: int) -> list[str]:
    """Return the command before `-m MODULE ARGUMENTS`: Python, or torchrun for several ranks."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "thrifty.training.local_torchrun", f"--nproc-per-node={ranks}"]


def settings(ranks: int) -> dict[str, str]:
    """Return environment variables that divide the cores equally among `ranks` on one machine. By default torchrun
    limits each rank to one core."""
    return {} if ranks == 1 else {"OMP_NUM_THREADS": str(max(len(usable_cores()) // ranks, 1))}


def launch_command(ranks: int, options: str = "") -> str:
    """Return the first words of the command that trains on `ranks` ranks with `options`."""
    return f"thrifty train{options}" + (f" --ranks {ranks}" if ranks > 1 else "")
