"""`thrifty show`: the card of one technique, and what was measured of it."""

import click


@click.command()
@click.argument("technique")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(technique: str, as_json: bool) -> None:
    """What TECHNIQUE does, promises and costs, when not to use it, its settings with their defaults, and what was
    measured of it in comparisons and studies under results/ and runs/."""
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.show(technique), as_json)
