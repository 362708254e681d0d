"""LoRA (Hu et al. 2022): train a low-rank addition to each frozen weight matrix.

Paper       Hu et al. 2022, LoRA (arXiv 2106.09685), section 4.1. The rank-stabilized scale is from Kalajdzievski 2023
            (arXiv 2312.03732).
Promise     Gradients and optimizer state exist only for the two factors A and B of each layer. The model's function is
            unchanged at step 0.
Use         model = thrifty.apply(model, "lora", rank=8, alpha=16)
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
            weights = thrifty.merge(model).state_dict()  # after training
Start with  `lora:rank=8,alpha=16` and ten times the learning rate of full fine-tuning. Set `rank_stabilized=true`
            before changing the rank, because otherwise the effective learning rate changes.
Cost        Two thin matrix products per layer. `torch.nn.MultiheadAttention` computes W + scale · B A at each call, and
            is not adapted if LoRA's `dropout` is above 0.
Avoid       Training from scratch, because updates have low rank. Merging into 16-bit weights, because rounding partly
            removes small additions.
Does not    Change the frozen weights, or adapt a weight that two layers share, because merging would change both
            layers.
"""

import re
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive, Probability
from thrifty.core.state import TrainState
from thrifty.modeling.adapter_base import AdapterTechnique, train_only
from thrifty.modeling.attention_parts import part_of_attention, part_of_layer
from thrifty.modeling.embeddings import output_layers
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.lora_layers import DEFAULT, LoraFactors, weight_name, widths
from thrifty.modeling.lora_model import attach, factor_names, is_merged, merge_and_remove
from thrifty.modeling.module_surgery import select, tied_names, weight_layers
from thrifty.modeling.parameter_kinds import FusedSlices, fused_slices

_USED_BY_ATTENTION = (nn.MultiheadAttention, NonDynamicallyQuantizableLinear)
"""torch's attention, and the class of its output layer. The attention reads the output layer's weight without calling
the layer.
"""


class Lora(AdapterTechnique):
    """Adapts linear layers, `Conv1D`, embeddings and torch's `MultiheadAttention` of any model. Each slice of a fused
    layer has its own factors. Merging for export adds scale · B A to the weight in float32 and rounds once.
    `modeling/lora_model.py` merges adapters, restores original weights, and stores several adapters for one base model.

    Differs from the paper: A is Kaiming-uniform and B is zero, as in reference implementations; the paper has a
    Gaussian A. In an embedding A is zero and B is normal. The paper adapts only queries and values; `slices=qv` does so
    here.
    """

    rank: Positive = 8
    alpha: float = 16.0
    dropout: Probability = 0.0
    """Dropout probability of the input of A. The frozen layer receives the input without dropout."""
    where: str = ""
    """Pattern in the names of adapted layers: `embed` matches most embeddings, and "." matches every layer. An empty
    pattern adapts every linear layer except the model's output layers."""
    slices: str = "qkv"
    """Projections to adapt: letters of q (queries), k (keys) and v (values). Each slice of a fused layer has its own A.
    An empty text adapts a fused layer as one matrix."""
    also: str = ""
    """Pattern in the names of parameters that are trained in full, such as a head or norms."""
    rank_stabilized: bool = False
    """Scale the addition by alpha / sqrt(rank) instead of alpha / rank."""
    seed: int = 0
    """Seed of the initial values of A, combined with each layer's name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not set(self.slices) <= set("qkv"):
            raise UsageError(
                f"{self.name}: slices is {self.slices!r}, not letters of 'qkv'", fix="slices=qv; or an empty text"
            )

    def model(self, model: nn.Module) -> nn.Module:
        return self.attach(model)

    def attach(self, model: nn.Module, name: str = DEFAULT) -> nn.Module:
        """Add an adapter called `name`, with the settings of this technique. Other adapters of the model stay."""
        layers, also = self.layers(model), self._also_trained(model)
        attach(model, layers, name, self.seed)
        train_only(model, factor_names(model) | also)
        return model

    def layers(self, model: nn.Module) -> dict[str, LoraFactors]:
        """Return the sizes of the factors of each adapted layer, by layer name.

        Raises RefusedError if no layer matches, the rank is too large, or a fused layer cannot be cut into slices.
        """
        linear = weight_layers(model)
        heads = {} if self.where else output_layers(model)
        kinds = {type(layer) for layer in linear.values()} | ({nn.Embedding} if self.where else set())
        widest = max((_narrow(layer) for name, layer in linear.items() if name not in heads), default=0)
        tied = {name for names in tied_names(model).items() for name in names}
        cuts = _cuts(model)

        def skip(name: str, layer: nn.Module) -> str | None:
            if name in heads:
                return "it is the head"
            if not self.where and 0 < _narrow(layer) < self.rank <= widest:
                return f"it is smaller than the rank {self.rank}"
            if f"{name}.{weight_name(layer)}" in tied:
                return "its weight is tied"
            letters = _letters(name, cuts.get(name))
            if self.slices and letters and not set(letters) & set(self.slices):
                return f"slices={self.slices} excludes it"
            if self.dropout and isinstance(layer, _USED_BY_ATTENTION):
                return "its attention reads the weight without calling the layer, so LoRA dropout is impossible"
            return _reason_to_skip(name, layer)

        selection = select(model, (nn.Linear, nn.MultiheadAttention, *kinds), self.where, skip)
        add_note(f"adapted: {_numberless(selection.matched)}")
        if several := [*_stacked_matrices(model)]:
            add_note(f"not adapted: {_numberless(several)}, which hold several matrices in one tensor")
        return {name: self._factors(name, layer, cuts.get(name)) for name, layer in selection.matched.items()}

    def _factors(self, name: str, layer: nn.Module, cut: FusedSlices | None) -> LoraFactors:
        letters = _letters(name, cut)
        if cut is None and self.slices and not set(letters) <= set(self.slices):
            raise RefusedError(
                f"the slices of queries, keys and values in {name} are unknown",
                fix="slices=qkv to adapt the whole layer; or exclude the layer by `where`",
            )
        sizes = cut.sizes if cut is not None and self.slices else ()
        chosen = tuple(i for i in range(len(sizes)) if not letters or letters[i] in self.slices)
        width_in, width_out = widths(layer)
        width_out = min((sizes[i] for i in chosen), default=width_out)
        if self.rank > min(width_in, width_out):
            raise RefusedError(
                f"rank '{self.rank}' is larger than a side of the weight {(width_out, width_in)} of {name}",
                fix=f"rank={min(width_in, width_out)} or less",
            )
        return LoraFactors(self.rank, self.alpha, self.dropout, self.rank_stabilized, sizes, chosen)

    def _also_trained(self, model: nn.Module) -> set[str]:
        names = {name for name, _ in model.named_parameters() if self.also and re.search(self.also, name)}
        if self.also and not names:
            raise RefusedError(
                f"no parameter matches also={self.also!r}",
                fix='also="head|norm"; or another pattern of parameter names',
            )
        return names

    def finish(self, model: nn.Module) -> nn.Module:
        merge_and_remove(model)
        return model.requires_grad_(True)

    def holds(self, state: TrainState) -> None:
        super().holds(state)
        assert state.model is not None
        if is_merged(state.model):
            raise IntegrityError(f"{self.name}: the additions B A were merged into the weights during training")


def _numberless(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "N", name) for name in names))


def _stacked_matrices(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that hold one matrix per expert."""
    for name, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            if (
                parameter.ndim == 3
                and min(parameter.shape) > 1
                and not isinstance(module, nn.Conv1d | nn.ConvTranspose1d)
            ):
                yield f"{name}.{last}"


def _narrow(layer: nn.Module) -> int:
    """Return the smaller side of a layer's weight matrix; 0 if the layer has no single weight matrix."""
    return 0 if getattr(layer, weight_name(layer)) is None else min(widths(layer))


def _cuts(model: nn.Module) -> dict[str, FusedSlices]:
    named = {name: p for name, p in model.named_parameters(remove_duplicate=False) if name.endswith("weight")}
    cuts = zip(named, fused_slices([*named], [*named.values()]), strict=True)
    fused = {re.sub(r"\.(in_proj_)?weight$", "", name): cut for name, cut in cuts if cut is not None}
    return {name: cut for name, cut in fused.items() if len(cut.sizes) < 3 or _stores_parts(model, name)}


def _stores_parts(model: nn.Module, name: str) -> bool:
    """Return True if a fused layer stores all queries, then all keys and all values."""
    layer, owner = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    return (
        hasattr(layer, "parts")
        or isinstance(layer, nn.MultiheadAttention)
        or part_of_layer(name, layer, owner) == "qkv"
    )


def _letters(name: str, cut: FusedSlices | None) -> str:
    """Return the letters of the projections (q, k, v) that a layer computes, in order; "" if it computes none."""
    part = part_of_attention(name)
    if cut is not None:
        return "qkv" if len(cut.sizes) == 3 else "kv" if part else ""
    whole = {"query_key_value": "qkv", "qkv": "qkv", "kv": "kv", "other": ""}
    return whole.get(part, part[:1])


def _reason_to_skip(name: str, layer: nn.Module) -> str | None:
    weight = getattr(layer, weight_name(layer))
    if weight is None:
        return "its queries, keys and values have different inputs"
    if not weight.is_floating_point():
        return "its weight is quantized"
    if isinstance(layer, nn.Embedding):
        if any("relative" in word for word in name.split(".")[-2:]):
            return "it stores attention scores, not vectors"
        if layer.max_norm is not None:
            return "it rescales its weight in the forward pass (max_norm)"
        # many position embeddings have a special class, whose input is not tokens
        is_known = type(layer).forward is nn.Embedding.forward or hasattr(layer, "embed_scale")
    else:
        is_known = isinstance(layer, nn.Linear | nn.MultiheadAttention) or is_transposed(layer)
    return None if is_known else f"the computation of a {type(layer).__name__} is unknown"
