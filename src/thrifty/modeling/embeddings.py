"""The embeddings whose outputs enter a model's residual stream, and the output head."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note
from thrifty.modeling.layer_shapes import in_width, out_width
from thrifty.modeling.module_surgery import (
    change_first,
    find_stacks,
    is_under,
    returns_stream_width,
    weight_layers,
)

_SCORES = re.compile(r"relative")
_NO_TOKENS = re.compile(r"pos|wpe|type|segment")


def stream_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the embeddings that write to the residual stream, by name: tokens, positions, segment types. They are
    outside the blocks."""
    stacks = find_stacks(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and not any(_SCORES.search(word) for word in name.split(".")[-2:])
        and not any(is_under(name, stack) for stack in stacks)
    }


def token_tables(model: nn.Module) -> dict[str, nn.Embedding]:
    """Return the embeddings of tokens only, by name."""
    return {
        name: table
        for name, table in stream_tables(model).items()
        if not _NO_TOKENS.search(name.rpartition(".")[2].lower())
    }


def stack_after(table: str, stacks: Iterable[str]) -> str:
    """Return the stack of blocks that an embedding table feeds: the stack whose name shares the longest path with the
    table's name. For a table that both stacks share, this is the first stack, the encoder."""

    def shared(stack: str) -> int:
        same = [
            table_part == stack_part for table_part, stack_part in zip(table.split("."), stack.split("."), strict=False)
        ]
        return same.index(False) if False in same else len(same)

    return max(stacks, key=shared)


def own_multiplier(model: nn.Module, table: nn.Embedding) -> float:
    """Return the factor that an embedding table or its parent module applies to the table's outputs. The factor is read
    from an attribute; it is 1 without such an attribute."""
    holders: list[nn.Module] = [table]
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding) and module.weight is table.weight:
            holders += [module, model.get_submodule(name.rpartition(".")[0])]
    for holder in holders:
        for word in ("embed_scale", "scalar_embed_scale", "scale"):
            value = getattr(holder, word, None)
            if isinstance(value, int | float) and value != 1.0:
                return float(value)
    return 1.0


def multiply(table: nn.Embedding, factor: Tensor | float) -> None:
    """Multiply the outputs of an embedding table by a constant."""
    table.register_buffer("multiplier", torch.as_tensor(factor, device=table.weight.device), persistent=False)
    table.register_forward_hook(_times_multiplier)


def _times_multiplier(module: nn.Module, args: Any, output: Any) -> Any:
    # a tuple contains the rows and their positions, as in ProphetNet's position table
    return change_first(output, lambda x: x * module.multiplier.to(x.dtype))


@torch.no_grad()
def size_stream(model: nn.Module, multiplier: float = 0.0) -> None:
    """Scale the outputs of the embedding tables by `multiplier`. For 0, choose the factor that gives the sum of a
    stack's tables an RMS of 1. The factor replaces the first norm. Without it, the branches would receive only the
    small initial values of a table (about 0.02)."""
    tables, tokens = stream_tables(model), token_tables(model)
    feeding: dict[str, dict[str, nn.Embedding]] = {}
    for name, table in tables.items():
        feeding.setdefault(stack_after(name, find_stacks(model)), {})[name] = table
    for stack, own in feeding.items():
        sizes = {}
        for name, table in own.items():
            factor = own_multiplier(model, table) if name in tokens else 1.0
            sizes[id(table.weight)] = factor**2 * table.weight.square().mean()
        for table in own.values():
            multiply(table, multiplier or torch.stack([*sizes.values()]).sum().rsqrt())
        how = f"by {multiplier:g}" if multiplier else "so that their sum has an RMS of 1"
        add_note(f"the outputs of {', '.join(own)} to {stack or 'the model'} are multiplied {how}")
    if not tables:
        add_note("no token table was found; the stream is not scaled")


def output_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that produce a model's outputs, by name. They are found by structure.

    An output layer is outside the blocks, and no later layer has its output width as input width. The result is empty
    for a bare encoder or decoder of `transformers`. In a model without blocks, output layers are the last layer, and
    all layers of its container whose output no later layer uses.
    """
    layers = weight_layers(model)
    try:
        stacks = [name for name, blocks in find_stacks(model).items() if returns_stream_width(blocks[0])]
    except RefusedError:
        stacks = []
    inner, known = _parts_of_transformers(model)
    outside = {
        name: layer
        for name, layer in layers.items()
        if layer not in inner and not any(is_under(name, stack) for stack in stacks)
    }
    heads = {name: layer for name, layer in outside.items() if layer in known}
    if stacks:
        in_blocks = [name for name in layers if any(is_under(name, stack) for stack in stacks)]
        width, order = in_width(layers[in_blocks[0]]), [*layers]
        first, outputs = order.index(in_blocks[0]), {out_width(layer) for layer in outside.values()}
        for name, layer in [*outside.items()]:
            reads_stream, writes_stream = in_width(layer) == width, out_width(layer) == width
            makes_stream = writes_stream and not reads_stream and in_width(layer) not in outputs
            if makes_stream or (order.index(name) < first and (writes_stream or not reads_stream)):
                del outside[name]
    elif not inner:
        last = next(reversed(outside), "")
        holder = last.rpartition(".")[0]
        is_set = isinstance(model.get_submodule(holder), nn.ModuleList | nn.ModuleDict)
        outside = {name: outside[name] for name in outside if name == last or (is_set and is_under(name, holder))}
    names = [*outside]
    for index, (name, layer) in enumerate(outside.items()):
        if not any(in_width(outside[later]) == out_width(layer) for later in names[index + 1 :]):
            heads[name] = layer
    return heads


def _parts_of_transformers(model: nn.Module) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the modules inside base models of `transformers`, and the output heads of its models.

    A model that is its own base, contains other models and has no output embedding, such as CLIPForImageClassification,
    may have output layers outside those models.
    """
    inner: set[nn.Module] = set()
    heads: set[nn.Module] = set()
    for module in model.modules():
        if not _has_base(module):
            continue
        base, head = module.base_model, module.get_output_embeddings()  # type: ignore[operator]
        heads.update([] if head is None else [head])
        contains_others = sum(map(_has_base, module.modules())) > 1
        if base is not module or (head is None and not contains_others):
            inner.update(base.modules())  # type: ignore[union-attr]
    return inner - heads, heads


def _has_base(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_model", None), nn.Module) and hasattr(module, "get_output_embeddings")


def find_head(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the name and module of the last output layer; None if there is no output layer."""
    return next(reversed(output_layers(model).items()), None)


def find_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the last output layer and those beside it, by name: the heads of a model of `transformers`, or layers in
    one `nn.ModuleList` or `nn.ModuleDict`. Other output layers may be read by the last."""
    layers = output_layers(model)
    last = next(reversed(layers), "")
    holder = last.rpartition(".")[0]
    is_set = isinstance(model.get_submodule(holder), nn.ModuleList | nn.ModuleDict)
    if _has_base(model) or _has_base(getattr(model, "lm", nn.Identity())):
        return layers
    return {name: layer for name, layer in layers.items() if name == last or (is_set and is_under(name, holder))}


def is_tied(head: nn.Module, tables: Mapping[str, nn.Embedding]) -> bool:
    """Return True if an output head's weight is also the weight of a token embedding."""
    return any(head.weight is table.weight for table in tables.values())
