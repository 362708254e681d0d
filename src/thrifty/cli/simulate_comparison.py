"""What `thrifty simulate attention` adds about several designs: their filters, factors, and energy by all tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from thrifty.hardware.result import Result
    from thrifty.hardware.trace import AttentionTrace


def tell_masks(results: list[Result], traces: list[AttentionTrace]) -> None:
    from thrifty.cli.simulate import tell_table
    from thrifty.report.units import MISSING

    click.echo("\nWhat each one's own filter keeps; untrained where the paper trains it:")
    rows = [
        [result.machine.name, f"{trace.density:.3f}", trace.provenance.get("softmax kept", MISSING)]
        for result, trace in zip(results, traces, strict=True)
    ]
    tell_table(["design", "density", "softmax kept"], rows)


def tell_factors(results: list[Result], other: Result) -> None:
    from thrifty.cli.simulate import tell_table
    from thrifty.hardware.iso_peak import iso_peak

    click.echo(
        f"\nAt equal peak, faster than {other.machine.name} by fewer operations, times utilisation over its own:"
    )
    found = [(result.machine.name, iso_peak(result, other)) for result in results if result is not other]
    tell_table(
        ["design", "faster", "fewer operations", "utilisation", f"of {other.machine.name}"],
        [
            [
                name,
                *(f"{x:.3g}" for x in (factors.ratio, factors.omitted, factors.utilisation, factors.other_utilisation)),
            ]
            for name, factors in found
        ],
    )


def tell_tables(results: list[Result], names: list[str]) -> None:
    from thrifty.cli.simulate import tell_table
    from thrifty.cli.simulate_attention import joules
    from thrifty.hardware.energy import by_tables

    found = [by_tables(result.operations) for result in results]
    click.echo(f"\nThe same actions by each table ({', '.join(names)}):")
    tell_table(
        ["design", *(energy.table for energy in found[0])],
        [
            [result.machine.name, *(joules(energy.total) for energy in energies)]
            for result, energies in zip(results, found, strict=True)
        ],
    )
