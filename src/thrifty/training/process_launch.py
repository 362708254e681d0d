"""How a process of Python is started as one or several ranks."""

import sys

from thrifty.machine.cpu_features import usable_cores


def python(ranks: int) -> list[str]:
    """The command to which `-m`, a module and its words are added; several ranks are started by torchrun."""
    if ranks == 1:
        return [sys.executable]
    return [sys.executable, "-m", "thrifty.training.local_torchrun", f"--nproc-per-node={ranks}"]


def settings(ranks: int) -> dict[str, str]:
    """Environment variables for so many ranks on this machine: an equal part of its cores for each, of which torchrun
    would give them one."""
    return {} if ranks == 1 else {"OMP_NUM_THREADS": str(max(len(usable_cores()) // ranks, 1))}


def launch_command(ranks: int, options: str = "") -> str:
    """Return the beginning of the command that trains on so many ranks, with these options."""
    return f"thrifty train{options}" + (f" --ranks {ranks}" if ranks > 1 else "")
