"""`thrifty show`: the card of one technique, and what was measured of it."""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from thrifty.experiments.past_results import Evidence, StudyResult


@click.command()
@click.argument("technique")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(technique: str, as_json: bool) -> None:
    """What TECHNIQUE does, promises and costs, when not to use it, its settings with their defaults, and what was
    measured of it in comparisons and studies under results/ and runs/."""
    from dataclasses import asdict

    from thrifty.cli.verb_output import print_json

    card = card_of(technique)
    compared, studied = measured_of(technique)
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
    measured = [found.in_words() for found in (*compared, *studied)]
    click.echo("\nmeasured" if measured else f"\nnothing measured yet: thrifty compare RECIPE +{card['name']}")
    for line in measured:
        click.echo(f"  {line}")


def card_of(name: str) -> dict[str, Any]:
    """A technique's card as plain data: its file's docstring is the text."""
    import dataclasses
    import inspect
    import sys

    from thrifty import techniques
    from thrifty.core.setting_bounds import hints_of

    kind = techniques.find(name)
    hints = hints_of(kind)
    return {
        "name": name,
        "stage": kind.stage.label,
        "numerics": kind.numerics.value,
        "claims": sorted(kind.claims),
        "seams": [seam for seam in _SEAMS if seam in vars(kind)],
        "card": inspect.cleandoc(sys.modules[kind.__module__].__doc__ or ""),
        "settings": [
            {"name": field.name, "type": _type_name(hints[field.name]), "default": field.default}
            for field in dataclasses.fields(kind)
        ],
    }


def measured_of(name: str) -> "tuple[list[Evidence], list[StudyResult]]":
    """The comparisons and the studies in which a technique took part."""
    from thrifty.experiments.past_results import evidence, study_results

    return [found for found in evidence() if found.technique == name], study_results(name)


_SEAMS = ("model", "batches", "objective", "backward", "update", "changes", "footprint", "holds", "finish")


def _type_name(kind: Any) -> str:
    """A field's type in words: `int, at least 1`, `erk or uniform`, `a fraction of the run, or a number of steps`."""
    import typing

    from thrifty.core.run_relative_settings import Moment

    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind == Moment:
        return "a fraction of the run, or a number of steps"
    if origin is typing.Annotated:
        return f"{_type_name(arguments[0])}, {arguments[1]}"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    return getattr(kind, "__name__", str(kind))


def _example(settings: list[dict[str, Any]]) -> str:
    import json

    simple = [s for s in settings if isinstance(s["default"], (int, float)) and not isinstance(s["default"], bool)]
    return f":{simple[0]['name']}={json.dumps(simple[0]['default'])}" if simple else ""
