"""Which layers of a model are split over ranks that compute it together, and how.

    column  by its outputs: of queries, keys, values, hidden numbers each rank makes its own part
    row     by its inputs, which a column layer made: what ranks give is summed
    summed  whole, but used on a rank's own part only, so that its gradient is the sum over ranks
    whole   whole, and used on what every rank has whole

Our own models are known by the names of their layers, those of transformers by the plan that comes with them; for any
other the plan is given. Tables of tokens and the head are split along the vocabulary and need no plan.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from torch import nn

from thrifty.core.errors import RefusedError
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
"""The layers of `models/attention_layers.py` and `models/transformer_blocks.py`."""

OF_TRANSFORMERS: Mapping[str, Style] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "summed",
}


def split_plan(model: nn.Module, rules: Sequence[str] = ()) -> dict[str, Style]:
    """How each module inside the blocks is split, by name. `rules` are entries "pattern=style", in whose patterns *
    stands for any text: they come before all others. Raises RefusedError where nothing says how a model is split."""
    styles: dict[str, Style] = {}
    for pattern, style in (*_given(rules), *_known(model)):
        for name, _ in model.named_modules():
            if re.fullmatch(pattern, name):
                styles.setdefault(name, style)
    if not any(style == "row" for style in styles.values()):
        raise RefusedError(
            f"nothing says how the layers of {type(model).__name__} are split",
            fix='name them, for instance plan = ["*.attn.c_attn=column", "*.attn.c_proj=row"], or use a model of '
            "transformers that has a tensor-parallel plan",
        )
    return styles


def _known(model: nn.Module) -> Iterator[tuple[str, Style]]:
    """The patterns of our own models, or of the outermost model that brings its plan."""
    for prefix, module in model.named_modules():
        if plan := getattr(module, "_tp_plan", None):
            stacks = find_stacks(model)
            for pattern, theirs in plan.items():
                full = f"{prefix}.{pattern}" if prefix else pattern
                if not any(is_under(full, stack) for stack in stacks):
                    continue  # tables and the head
                if theirs not in OF_TRANSFORMERS:
                    raise RefusedError(
                        f"the plan of {type(module).__name__} splits {pattern} as {theirs}, which is not known here",
                        fix=f'say how, for instance plan = ["*.{pattern.rpartition("*.")[2]}=column"]',
                    )
                yield _regular(full), OF_TRANSFORMERS[theirs]
            return
    for pattern, style in OWN.items():
        yield _regular(pattern), style


def _given(entries: Sequence[str]) -> Iterator[tuple[str, Style]]:
    for entry in entries:
        pattern, _, style = entry.rpartition("=")
        if style not in get_args(Style) or not pattern:
            raise RefusedError(
                f"plan: {entry!r} is not pattern=style", fix=f"the styles are {', '.join(get_args(Style))}"
            )
        yield _regular(pattern), style


def _regular(pattern: str) -> str:
    return ".*".join(map(re.escape, pattern.split("*")))
