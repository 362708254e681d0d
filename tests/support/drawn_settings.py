"""Random settings of techniques within their bounds, repeatable by a seed."""

import random
import typing
from contextlib import suppress
from dataclasses import fields
from typing import Any

from tiny_runs import SETTINGS, technique

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.setting_bounds import SettingBound, hints_of

NOT_DRAWN = {"batch", "cost_source", "kernel", "offload", "time_source", "to"}
"""Settings that the run fills in, that are measured, or that depend on the machine."""
ATTEMPTS = 12
"""Draws of which at least one must be accepted."""
CHANGED = 2
"""Settings of a technique that a draw changes."""


def fitting_settings(name: str, seed: object) -> dict[str, Any]:
    """Return the first draw that a technique accepts for itself."""
    for attempt in range(ATTEMPTS):
        settings = draw_settings(name, (seed, attempt))
        with suppress(UsageError):
            technique(name, **settings)
            return settings
    raise AssertionError(f"{name} accepts none of {ATTEMPTS} draws")


def draw_settings(name: str, seed: object) -> dict[str, Any]:
    """Return a few settings of a technique with random values, which may not fit together."""
    kind, draws = techniques.find(name), random.Random(f"{name} {seed}")
    values = {field.name: field.default for field in fields(kind)} | SETTINGS.get(name, {})
    options = {}
    for setting, hint in hints_of(kind).items():
        if setting in values and setting not in NOT_DRAWN:
            value = draw_value(hint, values[setting], draws)
            if value is not None:
                options[setting] = value
    return {setting: options[setting] for setting in draws.sample(sorted(options), min(CHANGED, len(options)))}


def draw_value(hint: Any, usual: Any, draws: random.Random) -> Any:
    """Return a value that the annotation admits, at most about twice the usual one, or None if it has no bounds."""
    if typing.get_origin(hint) is typing.Literal:
        return draws.choice(typing.get_args(hint))
    if hint is bool:
        return draws.random() < 0.5
    (bound,) = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, SettingBound)] or [None]
    if bound is None or usual is None:
        return None
    if isinstance(usual, tuple):
        return tuple(draw_number(bound, number, draws) for number in usual)
    return draw_number(bound, usual, draws)


def draw_number(bound: SettingBound, usual: float, draws: random.Random) -> float:
    """Return a number within the bound, or up to twice the usual one where the bound is open."""
    lowest = next((limit for limit in (bound.least, bound.above) if limit is not None), 2 * min(usual, 0))
    highest = next((limit for limit in (bound.most, bound.below) if limit is not None), 2 * abs(usual))
    if isinstance(usual, int):
        return draws.randint(int(lowest), max(int(highest), int(lowest) + 3))
    while not bound.admits(number := float(f"{draws.uniform(lowest, highest):.3g}")):
        pass
    return number
