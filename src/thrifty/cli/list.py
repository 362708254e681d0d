"""`thrifty list`: what there is to choose from."""

import click

KINDS = ("techniques", "recipes", "studies", "presets", "objectives")


@click.command()
@click.argument("kind", type=click.Choice(KINDS), default="techniques")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(kind: str, as_json: bool) -> None:
    """List techniques (the default), recipes, studies, presets or objectives; `thrifty data list` lists data."""
    from thrifty.cli.verb_output import print_result

    kinds = {"techniques": _techniques, "recipes": _recipes, "studies": _studies, "presets": _presets}
    rows = {**kinds, "objectives": _objectives}[kind]()
    width = max(len(name) for name, _ in rows)
    words = "\n".join(f"{name:<{width}}  {about}" for name, about in rows)
    print_result([{"name": name, "about": about} for name, about in rows], lambda: words, as_json)


def _first_line(text: str | None) -> str:
    line = (text or "").strip().split("\n")[0]
    return line.partition(": ")[2] or line


def _techniques() -> list[tuple[str, str]]:
    import sys

    from thrifty import techniques

    rows = []
    for name in techniques.names():
        outside = techniques.third_party().get(name)
        if outside is not None:  # a stranger's code is loaded only when its technique is named
            rows.append((name, f"from the package {outside.dist.name if outside.dist else outside.value}"))
        else:
            rows.append((name, _first_line(sys.modules[techniques.find(name).__module__].__doc__)))
    return rows


def _recipes() -> list[tuple[str, str]]:
    from thrifty.recipes import RECIPES

    return [(name, make().about) for name, make in RECIPES.items()]


def _studies() -> list[tuple[str, str]]:
    from thrifty.experiments import studies

    made = [studies.make(name) for name in studies.names()]
    return [(study.name, f"{study.about} About {study.minutes:g} min.") for study in made]


def _presets() -> list[tuple[str, str]]:
    import torch

    from thrifty.models.model_presets import PRESETS, assemble

    rows = []
    for name, shape in PRESETS.items():
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in assemble(shape).parameters())
        ends = f"vocabulary {shape.vocabulary:,}"
        if shape.style == "clip":
            ends = f"images of {shape.image} pixels in patches of {shape.patch}, captions of {shape.length} tokens"
        if shape.style == "mae":
            ends = f"a decoder of {shape.decoder_depth}, images of {shape.image} pixels in patches of {shape.patch}"
        if shape.style == "vit":
            ends = f"images of {shape.image} pixels in patches of {shape.patch}, {shape.vocabulary:,} labels"
        about = f"{shape.depth} blocks, width {shape.width}, {ends}, {parameters:,} parameters"
        rows.append((name, about))
    return rows


def _objectives() -> list[tuple[str, str]]:
    from thrifty.objectives import OBJECTIVES

    return [(name, _first_line(make.__doc__)) for name, make in OBJECTIVES.items()]
