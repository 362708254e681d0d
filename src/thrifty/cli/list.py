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


def _first_paragraph(docstring: str | None) -> str:
    """On one line, without the name that it may begin with, as in `RigL: train at a fixed density.`"""
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return paragraph.partition(": ")[2] or paragraph


def _techniques() -> list[tuple[str, str]]:
    from thrifty import techniques

    return [(name, _about(name)) for name in techniques.names()]


def _about(name: str) -> str:
    """A technique's description, read from its file without running it: it may be a stranger's."""
    import ast

    from thrifty import techniques

    file = techniques.source_file(name)
    if file is None:
        outside = techniques.third_party().get(name)
        return f"from the package {outside.dist.name if outside.dist else outside.value}" if outside else "no .py file"
    try:
        if not file.is_file():
            raise OSError("no regular file")
        return _first_paragraph(ast.get_docstring(ast.parse(file.read_bytes(), str(file)))) or "no description"
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read: {type(error).__name__}: {error} ({file})"


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
    import re

    from thrifty.objectives import OBJECTIVES

    paragraphs = {name: _first_paragraph(make.__doc__) for name, make in OBJECTIVES.items()}
    return [(name, re.split(r"(?<=\.) (?=[A-Z])", text)[0]) for name, text in paragraphs.items()]
