"""`thrifty show`: the card of a technique, an objective, a preset or an accelerator design."""

import click


@click.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["technique", "objective", "preset", "design"]),
    help="Kind of card, for a name of several kinds, such as a3.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str, kind: str | None, as_json: bool) -> None:
    """Show the card of NAME: paper, promise, use, settings with defaults, cost, when to avoid it.

    NAME is a technique, an objective, a model preset or an accelerator design. Below the card of a technique stands its
    evidence from comparisons, studies and benchmarks under results/ and runs/.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.show(name, kind=kind), as_json)
