"""LoRA factors of one layer: linear layers, `Conv1D`, embeddings, and torch's own attention.

The factors are parameters of the layer, `lora_a` and `lora_b`; a named adapter has `lora_a_NAME` and `lora_b_NAME`. The
layer's note `LORA` stores settings and states of its adapters.
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
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.module_surgery import wrap_forward

DEFAULT = "default"


@dataclass(frozen=True)
class LoraFactors:
    """Settings of an adapter on one layer, without its tensors."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rank_stabilized: bool = False
    sizes: tuple[int, ...] = ()
    """Output widths of fused layers, each with separate factors; empty for a single layer."""
    chosen: tuple[int, ...] = ()
    """Indices of the fused layers that have factors."""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass
class LayerAdapters:
    """The adapters of a layer."""

    factors: dict[str, LoraFactors] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    original_weight: Tensor | None = None
    """The original weight while adapters are merged into the layer's weight, else None."""
    former: Callable[..., Any] | None = None
    """The layer's previous wrapped forward, if any."""

    @property
    def adding(self) -> tuple[str, ...]:
        return () if self.original_weight is not None else self.active


LORA: ModuleNote[LayerAdapters] = ModuleNote("lora_adapters")


def weight_name(layer: nn.Module) -> str:
    return "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"


def is_stored_in_out(layer: nn.Module) -> bool:
    """Return True if the layer's weight has shape (in, out), as in `Conv1D` and in an embedding (with a one-hot vector
    as input)."""
    return isinstance(layer, nn.Embedding) or is_transposed(layer)


def widths(layer: nn.Module) -> tuple[int, int]:
    """Return the input width and the output width of a layer."""
    rows, columns = getattr(layer, weight_name(layer)).shape
    return (rows, columns) if is_stored_in_out(layer) else (columns, rows)


def parameter_names(name: str = DEFAULT) -> tuple[str, str]:
    """Return the parameter names of the factors A and B of the adapter `name`. They are the same on every layer."""
    end = "" if name == DEFAULT else f"_{name}"
    return f"lora_a{end}", f"lora_b{end}"


def add_factors(
    layer: nn.Module, factors: LoraFactors, name: str = DEFAULT, generator: torch.Generator | None = None
) -> None:
    """Add the factors of an adapter to one layer and activate the adapter. The layer's own parameters are frozen. A is
    initialized Kaiming-uniform and B to zero, so B A starts at zero. In an embedding A is zero and B is normal."""
    weight = getattr(layer, weight_name(layer))
    in_size, out_size = widths(layer)
    if factors.sizes:
        out_size = sum(factors.sizes[index] for index in factors.chosen)
    new = weight.new_empty(0, dtype=torch.promote_types(weight.dtype, torch.float32))
    a, b = new.new_zeros(factors.rank * (len(factors.chosen) or 1), in_size), new.new_zeros(out_size, factors.rank)
    if isinstance(layer, nn.Embedding):
        nn.init.normal_(b, generator=generator)
    else:
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    adapters = attach_adapters(layer)
    if not adapters.factors:
        layer.requires_grad_(False)
    for parameter_name, values in zip(parameter_names(name), (a, b), strict=True):
        layer.register_parameter(parameter_name, nn.Parameter(values))
    adapters.factors[name] = factors
    adapters.active = (*adapters.active, name)


def attach_adapters(layer: nn.Module) -> LayerAdapters:
    """Return a layer's adapters. If the layer has no adapters yet, wrap its forward."""
    if (adapters := LORA.get(layer)) is None:
        adapters = LORA.set(layer, LayerAdapters(former=vars(layer).get("forward")))
        forwards = ((nn.MultiheadAttention, _attend), (nn.Embedding, _look_up))
        wrap_forward(layer, next((forward for kind, forward in forwards if isinstance(layer, kind)), _multiply))
    return adapters


def detach_adapters(layer: nn.Module) -> None:
    """Undo `attach_adapters`."""
    former = LORA.remove(layer).former
    if former is None:
        del layer.forward
    else:
        layer.forward = former  # type: ignore[method-assign]


def factors_of(layer: nn.Module, name: str = DEFAULT) -> tuple[Tensor, Tensor, float]:
    """Return the factors A and B and the scale of an adapter. A is (k, in), B is (out, k). k is the rank times the
    number of `chosen` fused layers."""
    a, b = (getattr(layer, each) for each in parameter_names(name))
    own = LORA.of(layer).factors[name]
    return a, on_diagonal(b, own.sizes, own.chosen) if own.sizes else b, own.scale


def with_products(layer: nn.Module, weights: Mapping[str, float]) -> Tensor:
    """Return the layer's weight plus scale · B A of its adapters. `weights` maps the name of an adapter to a multiplier
    of its product. The sum is rounded once at the end."""
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
        # a subclass of nn.Embedding may scale its outputs, as in Gemma
        multiplier = 1.0 if type(table) is nn.Embedding else getattr(table, "embed_scale", 1.0)
        thin = F.embedding(tokens, a.T, table.padding_idx) * (scale * multiplier)
        result = (result + F.linear(thin, b)).to(result.dtype)
    return result


def _attend(attention: nn.MultiheadAttention, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's attention with adapted weights, because `nn.MultiheadAttention` does not call its own layers."""
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
