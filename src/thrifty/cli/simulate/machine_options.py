"""Read the options that name and change a simulated accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec


def read_machine_options(words: str) -> AcceleratorSpec:
    """A machine by `NAME`, or `NAME:KEY=VALUE:KEY=VALUE` with values changed, by whose words it is then called."""
    from dataclasses import replace

    from thrifty.core.errors import UsageError
    from thrifty.simulators.accelerator.accelerator_file import find_machine

    name, *assignments = words.strip().split(":")
    machine = find_machine(name)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r} sets nothing", fix=f"for example {name}:copies=2")
        machine = replace(machine.replaced(path.strip(), value.strip()), name=words.strip())
    return machine
