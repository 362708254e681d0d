"""`thrifty show`: the card of one technique, and what was measured of it."""

from typing import Any

import click

from thrifty.cli.technique_card import card_of, measured_of


@click.command()
@click.argument("technique")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(technique: str, as_json: bool) -> None:
    """What TECHNIQUE does, promises and costs, when not to use it, its settings with their defaults, and what was
    measured of it in comparisons and studies under results/ and runs/."""
    from dataclasses import asdict

    from thrifty.cli.verb_output import print_json

    card = card_of(technique)
    compared, studied = measured_of(card["name"])
    if as_json:
        print_json(card | {"comparisons": [*map(asdict, compared)], "studies": [*map(asdict, studied)]})
        return
    click.echo(f"{card['name']}  (stage {card['stage']}, numerics {card['numerics']})\n")
    click.echo(card["card"] + "\n")
    for setting in card["settings"]:
        click.echo(f"  {setting['name']} = {setting['default']!r}  ({setting['type']})")
    if not card["settings"]:
        click.echo("  no settings")
    click.echo(f"\nuse it: --with {card['name']}" + _example(card["settings"]))
    measured = [result.in_words() for result in (*compared, *studied)]
    comparison = f"thrifty compare RECIPE --variant '--with {card['name']}'"
    click.echo("\nmeasured" if measured else f"\nnothing measured yet: {comparison}")
    for line in measured:
        click.echo(f"  {line}")


def _example(settings: list[dict[str, Any]]) -> str:
    import json

    simple = [s for s in settings if isinstance(s["default"], (int, float)) and not isinstance(s["default"], bool)]
    return f":{simple[0]['name']}={json.dumps(simple[0]['default'])}" if simple else ""
