"""Generator of the catalog of names and cards: `python tools/catalog.py`. A test compares the file with the code."""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from thrifty import techniques
from thrifty.core.card import read_card
from thrifty.core.recipe import ObjectiveSettings
from thrifty.experiments import studies
from thrifty.interface import catalog
from thrifty.interface.catalog import Kind
from thrifty.interface.technique_profiles import profile_of, settings_of
from thrifty.models.families import FAMILIES, assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import PRESETS
from thrifty.objectives import OBJECTIVES
from thrifty.recipes import RECIPES
from thrifty.simulators.accelerator.accelerator_file import find_machine, machine_names

FILE = Path(catalog.__file__).with_suffix(".json")
Entry = dict[str, Any]


def _technique(name: str) -> Entry:
    entry = asdict(profile_of(techniques.find(name)))
    del entry["evidence"]
    return entry


def _study(name: str) -> Entry:
    study = studies.make(name)
    return {"about": f"{study.about} About {study.minutes:g} min."}


def _objective(name: str) -> Entry:
    kind = OBJECTIVES[name]
    card = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    in_recipe = {field.name for field in fields(ObjectiveSettings)}
    settings = [each for each in settings_of(kind) if each["name"] in in_recipe]
    notes = inspect.cleandoc(kind.__doc__ or "")
    return {"about": read_card(card).effect, "card": card, "notes": notes, "settings": settings}


def _preset(name: str) -> Entry:
    """Return the card of a preset's model family. The code example uses the preset, and the settings are its sizes."""
    shape = PRESETS[name]
    card = re.sub(r'train\("[^"]+"', f'train("{name}"', inspect.cleandoc(FAMILIES[shape.style].__doc__ or ""))
    about = _sizes(shape)
    return {"about": about, "card": card, "notes": about, "settings": _settings(vars(shape), "model.")}


def _sizes(shape: ModelConfig) -> str:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in assemble(shape).parameters())
    ends = f"vocabulary {shape.vocabulary:,}"
    if shape.style == "clip":
        ends = f"images of {shape.image} pixels in patches of {shape.patch}, captions of {shape.length} tokens"
    if shape.style == "mae":
        ends = f"a decoder of {shape.decoder_depth}, images of {shape.image} pixels in patches of {shape.patch}"
    if shape.style == "vit":
        ends = f"images of {shape.image} pixels in patches of {shape.patch}, {shape.vocabulary:,} labels"
    return f"{shape.depth} blocks, width {shape.width}, {ends}, {parameters:,} parameters"


def _design(name: str) -> Entry:
    """Return the card of an accelerator design, with the settings of the accelerator."""
    machine = find_machine(name)
    design = importlib.import_module(f"thrifty.simulators.accelerator.designs.{machine.design}")
    card = inspect.cleandoc(design.__doc__ or "")
    return {"about": machine.about, "card": card, "notes": machine.about, "settings": _settings(machine.settings)}


def _settings(values: Mapping[str, Any], prefix: str = "") -> list[Entry]:
    return [
        {"name": f"{prefix}{name}", "type": type(value).__name__, "default": value}
        for name, value in values.items()
        if value is not None
    ]


def catalog_text() -> str:
    """Return the catalog as JSON, one line per name."""
    kinds: dict[Kind, dict[str, Entry]] = {
        "techniques": {name: _technique(name) for name in techniques.own_names()},
        "recipes": {name: {"about": make().about} for name, make in RECIPES.items()},
        "studies": {name: _study(name) for name in studies.names()},
        "presets": {name: _preset(name) for name in PRESETS},
        "objectives": {name: _objective(name) for name in OBJECTIVES},
        "designs": {name: _design(name) for name in machine_names()},
    }
    blocks = [f'"{kind}": {_block(map(_line, entries.items()))}' for kind, entries in kinds.items()]
    return _block(blocks) + "\n"


def _line(item: tuple[str, Entry]) -> str:
    return f"{json.dumps(item[0])}: {json.dumps(item[1], ensure_ascii=False, default=asdict)}"


def _block(lines: Iterable[str]) -> str:
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    FILE.write_text(catalog_text(), encoding="utf-8")
