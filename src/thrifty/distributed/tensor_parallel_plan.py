"""The tensor-parallel plan: layers of a model that are split, and the style of each split.

    column  split by outputs: each rank computes its own part of queries, keys, values or hidden units
    row     split by inputs, the outputs of column layers: the ranks' results are summed
    summed  whole, applied to a rank's own part of the activations; its gradient is summed over ranks
    whole   whole, applied to activations that every rank has

For Thrifty's own models, layer names determine the plan. Models of transformers have a plan in their class. For other
models the user passes a plan. Token embeddings and the output head are split along the vocabulary and require no plan.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from torch import nn

from thrifty.core.errors import RefusedError, class_name
from thrifty.modeling.module_surgery import find_stacks, is_under

Style = Literal["column", "row", "summed", "whole"]

OWN: Mapping[str, Style] = {
    "*.attention.qkv": "column",
    "*.attention.out": "row",
    "*.cross_attention.q": "column",
    "*.cross_attention.kv": "column",
    "*.cross_attention.out": "row",
    "*.mlp.up": "column",
    "*.mlp.down": "row",
    "*.relative.scores": "column",
}
"""Style of each layer in `models/attention_layers.py` and `models/transformer_blocks.py`, by pattern of its name."""

OF_TRANSFORMERS: Mapping[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "summed",
}


def split_plan(model: nn.Module, rules: Sequence[str] = ()) -> dict[str, Style]:
    """Return the style of each split module inside the blocks, by name. `rules` are entries "pattern=style", with * for
    any text. Rules have priority over the model's plan. Raise RefusedError if there is no plan for a model."""
    styles: dict[str, Style] = {}
    for pattern, style in (*_parsed_rules(rules), *_known(model)):
        for name, _ in model.named_modules():
            if re.fullmatch(pattern, name):
                styles.setdefault(name, style)
    if not any(style == "row" for style in styles.values()):
        raise RefusedError(
            f"no tensor-parallel plan is known for {class_name(model)}",
            fix='name its layers, for instance plan = ["*.attn.c_attn=column", "*.attn.c_proj=row"]; or use a model of '
            "transformers that has a tensor-parallel plan",
        )
    return styles


def _known(model: nn.Module) -> Iterator[tuple[str, Style]]:
    """Yield patterns and styles from the plan of the outermost module that has one. If no module has a plan, yield the
    patterns of Thrifty's models.
    """
    for prefix, module in model.named_modules():
        if plan := getattr(module, "_tp_plan", None):
            stacks = find_stacks(model)
            for pattern, style in plan.items():
                full = f"{prefix}.{pattern}" if prefix else pattern
                if not any(is_under(full, stack) for stack in stacks):
                    continue  # tables and the head
                if style not in OF_TRANSFORMERS:
                    raise RefusedError(
                        f"the plan of {type(module).__name__} splits {pattern} as {style}, which is unsupported",
                        fix=f'set its style, for instance plan = ["*.{pattern.rpartition("*.")[2]}=column"]',
                    )
                yield _regular(full), OF_TRANSFORMERS[style]
            return
    for pattern, style in OWN.items():
        yield _regular(pattern), style


def _parsed_rules(entries: Sequence[str]) -> Iterator[tuple[str, Style]]:
    for entry in entries:
        pattern, _, style = entry.rpartition("=")
        if style not in get_args(Style) or not pattern:
            raise RefusedError(
                f"plan: {entry!r} is not pattern=style", fix=f"the styles are {', '.join(get_args(Style))}"
            )
        yield _regular(pattern), style


def _regular(pattern: str) -> str:
    return ".*".join(map(re.escape, pattern.split("*")))
