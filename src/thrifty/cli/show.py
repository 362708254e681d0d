"""`thrifty show`: the card of a technique, its settings and its evidence."""

import click


@click.command()
@click.argument("technique")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(technique: str, as_json: bool) -> None:
    """Show the card of TECHNIQUE: paper, promise, use, settings with defaults, cost, when to avoid it.

    Evidence from comparisons, studies and benchmarks under results/ and runs/ is printed below the card.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.show(technique), as_json)
