"""Recipes whose examples are scored in a second: digits by a tiny ViT, and a few files as text."""

import textwrap
from pathlib import Path

from thrifty.core.recipe import Budget, DataSettings, ModelSettings, ObjectiveSettings, Recipe
from thrifty.techniques.optimizers.adamw import AdamW

STEPS = 10


def digits(**changed: object) -> Recipe:
    settings: dict = {
        "name": "digits",
        "model": ModelSettings(preset="vit-nano", patch=4, width=16, heads=2, depth=1),
        "data": DataSettings(source="digits", batch=64),
        "objective": ObjectiveSettings("classification"),
        "budget": Budget(steps=STEPS),
        "techniques": (AdamW(lr=3e-3),),
    }
    return Recipe(**(settings | changed))


def text(folder: Path, objective: str = "next_token", **changed: object) -> Recipe:
    source = folder / "text.txt"
    if not source.exists():
        source.write_text(Path(textwrap.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    preset = "bert-nano" if objective == "masked_token" else "llama-nano"
    settings: dict = {
        "name": "text",
        "model": ModelSettings(preset=preset, width=16, heads=2, depth=1),
        "data": DataSettings(source=str(source), vocabulary=300, length=16, batch=8),
        "objective": ObjectiveSettings(objective),
        "budget": Budget(steps=STEPS),
        "techniques": (AdamW(lr=3e-3),),
    }
    return Recipe(**(settings | changed))
