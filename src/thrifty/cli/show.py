"""`thrifty show`: the card of a technique, an objective, a preset or an accelerator design."""

import click


@click.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["technique", "objective", "preset", "design"]),
    help="Kind of card. Required for names of several kinds, such as a3.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str, kind: str | None, as_json: bool) -> None:
    """Show the card of NAME: paper, promise, use, settings with defaults, cost, and when to avoid it.

    NAME is a technique, an objective, a model preset or an accelerator design. The card of a technique ends with its
    evidence from comparisons, studies and benchmarks in results/ and runs/.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.show(name, kind=kind), as_json)
