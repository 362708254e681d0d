"""One layer with low-rank additions: linear layers, `Conv1D`, embeddings, and torch's own attention.

The factors are parameters of the layer, `lora_a` and `lora_b`, and `lora_a_NAME` and `lora_b_NAME` for an adapter with
a name. What else an adapter is stands in the layer's note `LORA`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.module_notes import ModuleNote
from thrifty.kernels.low_rank_product import add_low_rank, low_rank_product, on_diagonal
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.modeling.residual_branches import is_transposed

DEFAULT = "default"


@dataclass(frozen=True)
class LoraFactors:
    """What an adapter is on one layer, its tensors apart."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False
    sizes: tuple[int, ...] = ()
    """The widths of the layers fused in this one; none for a single layer. Each has factors of its own ..."""
    chosen: tuple[int, ...] = ()
    """... if its number is among these."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass
class LayerAdapters:
    """What a layer knows of its adapters."""

    factors: dict[str, LoraFactors] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    kept: Tensor | None = None
    """The weight as it was, while additions are merged into it."""
    former: Callable[..., Any] | None = None
    """The forward that something else had put on the layer before."""

    @property
    def adding(self) -> tuple[str, ...]:
        return () if self.kept is not None else self.active


LORA: ModuleNote[LayerAdapters] = ModuleNote("lora_adapters")


def weight_name(layer: nn.Module) -> str:
    return "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"


def is_stored_in_out(layer: nn.Module) -> bool:
    """Whether a weight is (in, out): `Conv1D`'s, and an embedding's, whose input is a token's one-hot vector."""
    return isinstance(layer, nn.Embedding) or is_transposed(layer)


def widths(layer: nn.Module) -> tuple[int, int]:
    """What a layer takes, and what it gives."""
    rows, columns = getattr(layer, weight_name(layer)).shape
    return (rows, columns) if is_stored_in_out(layer) else (columns, rows)


def parameter_names(name: str = DEFAULT) -> tuple[str, str]:
    """How the factors A and B of an adapter are called on each of its layers."""
    end = "" if name == DEFAULT else f"_{name}"
    return f"lora_a{end}", f"lora_b{end}"


def add_factors(
    layer: nn.Module, factors: LoraFactors, name: str = DEFAULT, generator: torch.Generator | None = None
) -> None:
    """Give one layer the factors of an adapter, active from now on. A starts as Kaiming-uniform and B as zero, so that
    nothing is added yet; in an embedding A as zero and B as normal. The layer's own parameters are frozen."""
    weight = getattr(layer, weight_name(layer))
    takes, gives = widths(layer)
    if factors.sizes:
        gives = sum(factors.sizes[index] for index in factors.chosen)
    new = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
    a, b = new.new_zeros(factors.rank * (len(factors.chosen) or 1), takes), new.new_zeros(gives, factors.rank)
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(b, generator=generator)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    adapters = attach_adapters(layer)
    if not adapters.factors:
        layer.requires_grad_(False)
    for each, values in zip(parameter_names(name), (a, b), strict=True):
        layer.register_parameter(each, nn.Parameter(values))
    adapters.factors[name] = factors
    adapters.active = (*adapters.active, name)


def attach_adapters(layer: nn.Module) -> LayerAdapters:
    """A layer's adapters; where it has none yet its forward is wrapped for them."""
    if (adapters := LORA.get(layer)) is None:
        adapters = LORA.set(layer, LayerAdapters(former=vars(layer).get("forward")))
        ways = ((nn.MultiheadAttention, _attend), (nn.Embedding, _look_up))
        wrap_forward(layer, next((way for kind, way in ways if isinstance(layer, kind)), _multiply))
    return adapters


def detach_adapters(layer: nn.Module) -> None:
    """Undo `attach_adapters`."""
    former = LORA.remove(layer).former
    if former is None:
        del layer.forward
    else:
        layer.forward = former  # type: ignore[method-assign]


def factors_of(layer: nn.Module, name: str = DEFAULT) -> tuple[Tensor, Tensor, float]:
    """A (k, in), B (out, k) and the scale of an adapter on a layer; k is the rank, times the fused layers chosen."""
    a, b = (getattr(layer, each) for each in parameter_names(name))
    own = LORA.of(layer).factors[name]
    return a, on_diagonal(b, own.sizes, own.chosen) if own.sizes else b, own.scale


def with_products(layer: nn.Module, weights: Mapping[str, float]) -> Tensor:
    """The layer's weight plus the products of these adapters, each times its number, rounded once at the end."""
    weight = getattr(layer, weight_name(layer))
    total = weight.to(torch.promote_types(weight.dtype, torch.float32))
    for name, factor in weights.items():
        a, b, scale = factors_of(layer, name)
        product = low_rank_product(a, b, scale * factor)
        total = total + (product.T if is_stored_in_out(layer) else product)
    return total.to(weight.dtype)


def _multiply(layer: nn.Module, inner: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result = inner(x, *args, **kwargs)
    for name in LORA.of(layer).adding:
        dropped = F.dropout(x, LORA.of(layer).factors[name].dropout, layer.training)
        result = add_low_rank(result, dropped, *factors_of(layer, name))
    return result


def _look_up(table: nn.Embedding, inner: Any, tokens: Tensor) -> Tensor:
    result = inner(tokens)
    for name in LORA.of(table).adding:
        a, b, scale = factors_of(table, name)
        # a table of a class of its own may multiply what it gives, as Gemma's does
        multiplier = 1.0 if type(table) is nn.Embedding else getattr(table, "embed_scale", 1.0)
        thin = F.embedding(tokens, a.T, table.padding_idx) * (scale * multiplier)
        result = (result + F.linear(thin, b)).to(result.dtype)
    return result


def _attend(attention: nn.MultiheadAttention, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """It calls none of its layers, so their weights are given the additions for the length of a call."""
    with _summed(attention), _summed(attention.out_proj):
        return inner(*args, **kwargs)


@contextmanager
def _summed(layer: nn.Module) -> Iterator[None]:
    adapters = LORA.get(layer) or LayerAdapters()
    if not adapters.adding:
        yield
        return
    parameters: dict[str, Any] = layer._parameters
    name = weight_name(layer)
    weight = parameters[name]
    parameters[name] = with_products(layer, dict.fromkeys(adapters.adding, 1.0))
    try:
        yield
    finally:
        parameters[name] = weight
