"""Plans for other trainers: an Accelerate configuration, a DeepSpeed one, a torchtitan-style one, a plain script."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from thrifty.core.errors import RefusedError
from thrifty.planning.exports import accelerate, deepspeed, torchtitan
from thrifty.planning.exports.portable_recipe import PortableRecipe

CONFIGURATIONS: Mapping[str, tuple[str, Callable[[PortableRecipe], str]]] = {
    "accelerate": ("accelerate.yaml", accelerate.configuration),
    "deepspeed": ("deepspeed.json", lambda run: json.dumps(deepspeed.configuration(run), indent=1) + "\n"),
    "torchtitan": ("torchtitan.toml", torchtitan.configuration),
}
"""What each is called beside the plan, and what is in it."""


def write_configuration(name: str, run: PortableRecipe, plan: Path) -> Path:
    """Writes `plan-accelerate.yaml` and the like beside plan.toml. Raises RefusedError where it is there already."""
    ending, text = CONFIGURATIONS[name]
    path = plan.with_name(f"{plan.stem}-{ending}")
    if path.exists():
        raise RefusedError(f"{path} is there already", fix="remove it, or give --out another name")
    path.write_text(text(run), encoding="utf-8")
    return path
