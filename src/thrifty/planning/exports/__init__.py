"""Exports of plans: configurations for Accelerate, DeepSpeed and torchtitan, and a plain PyTorch script."""

import json
from collections.abc import Callable, Mapping

from thrifty.planning.exports import accelerate, deepspeed, torchtitan
from thrifty.planning.exports.portable_recipe import PortableRecipe

CONFIGURATIONS: Mapping[str, tuple[str, Callable[[PortableRecipe], str]]] = {
    "accelerate": ("accelerate.yaml", accelerate.configuration),
    "deepspeed": ("deepspeed.json", lambda run: json.dumps(deepspeed.configuration(run), indent=1) + "\n"),
    "torchtitan": ("torchtitan.toml", torchtitan.configuration),
}
"""File name, and function that returns the content, by trainer."""
