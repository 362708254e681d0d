"""`thrifty list`: names to choose from."""

import click

KINDS = ("techniques", "recipes", "studies", "presets", "objectives")


@click.command()
@click.argument("kind", type=click.Choice(KINDS), default="techniques")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(kind: str, as_json: bool) -> None:
    """List techniques (the default), recipes, studies, presets or objectives; `thrifty data list` lists data."""
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.list(kind), as_json)
