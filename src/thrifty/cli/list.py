"""`thrifty list`: print the names that recipes and commands accept."""

import click

KINDS = ("techniques", "recipes", "studies", "presets", "objectives", "designs")


@click.command()
@click.argument("kind", type=click.Choice(KINDS), default="techniques")
@click.option("--search", default="", metavar="WORDS", help="Print only entries that contain all of these words.")
@click.option("--json", "as_json", is_flag=True, help="Print whole cards as one JSON document.")
def command(kind: str, search: str, as_json: bool) -> None:
    """List techniques by goal (the default), recipes, studies, presets, objectives or accelerator designs.

    With --json, an entry is a whole card: sections, goal, settings with defaults, and evidence. `thrifty data list`
    lists datasets.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.list(kind, search=search), as_json)
