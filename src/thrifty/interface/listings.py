"""`list`: the names that a recipe or a command can hold, with a description of each.

Names of techniques are listed without torch, which takes seconds to import.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from rich.console import RenderableType

from thrifty import techniques
from thrifty.core.errors import refuse_unknown
from thrifty.reporting.printed_result import PrintedResult, lines

Kind = Literal["techniques", "recipes", "studies", "presets", "objectives"]


class Listing(PrintedResult, dict[str, str]):
    """Names with a description each."""

    def as_dict(self) -> Any:
        return [{"name": name, "about": about} for name, about in self.items()]

    def __rich__(self) -> RenderableType:
        width = max(map(len, self))
        return lines(*(f"{name:<{width}}  {about}" for name, about in self.items()))


def list_names(kind: Kind = "techniques") -> Listing:
    """List techniques, recipes, studies, presets or objectives by name, with a description of each.

    Code of a third party's technique is not run. Raises UsageError for another kind.

    Example::

        print(thrifty.list("recipes"))
        "adapters.lora" in thrifty.list()
    """
    refuse_unknown("there is no list of", kind, get_args(Kind))
    return Listing(_KINDS[kind]())


def _first_paragraph(docstring: str | None) -> str:
    """Return it on one line, without the name that it may begin with, as in `RigL: train at a fixed density.`"""
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return paragraph.partition(": ")[2] or paragraph


def _techniques() -> Mapping[str, str]:
    return {name: _about(name) for name in techniques.names()}


def _about(name: str) -> str:
    """Read a technique's description from its file without running it: it may be a stranger's."""
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


def _recipes() -> Mapping[str, str]:
    from thrifty.recipes import RECIPES

    return {name: make().about for name, make in RECIPES.items()}


def _studies() -> Mapping[str, str]:
    from thrifty.experiments import studies

    made = map(studies.make, studies.names())
    return {study.name: f"{study.about} About {study.minutes:g} min." for study in made}


def _presets() -> Mapping[str, str]:
    import torch

    from thrifty.models.families import assemble
    from thrifty.models.model_presets import PRESETS

    rows = {}
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
        rows[name] = f"{shape.depth} blocks, width {shape.width}, {ends}, {parameters:,} parameters"
    return rows


def _objectives() -> Mapping[str, str]:
    from thrifty.objectives import OBJECTIVES

    paragraphs = {name: _first_paragraph(make.__doc__) for name, make in OBJECTIVES.items()}
    return {name: re.split(r"(?<=\.) (?=[A-Z])", text)[0] for name, text in paragraphs.items()}


_KINDS: Mapping[Kind, Callable[[], Mapping[str, str]]] = {
    "techniques": _techniques,
    "recipes": _recipes,
    "studies": _studies,
    "presets": _presets,
    "objectives": _objectives,
}
