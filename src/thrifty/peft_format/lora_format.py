"""LoRA in PEFT's format."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.modeling.lora_layers import LORA, LoraFactors, parameter_names, widths
from thrifty.modeling.lora_model import adapted_layers, adapters, attach
from thrifty.models.model_config import ModelConfig
from thrifty.peft_format.adapter_folder import AdapterFormat, StoredAdapter
from thrifty.peft_format.layer_naming import LayerNaming, misfit
from thrifty.peft_format.lora_pairs import LoraPair, join_pairs, rank_and_alpha, rank_settings, split_pairs, targets

_PREFIX = "base_model.model."
_INSIDE = ".base_layer"
"""Prefix of PEFT for the original parameters of an adapted layer."""
_FACTOR = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")


class LoraFormat(AdapterFormat):
    peft_type = "LORA"
    read = frozenset(
        {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"}
    )
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base as well
        **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False,)),
        **dict.fromkeys(("layer_replication", "trainable_token_indices", "target_parameters"), (None, [])),
        **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config"), (None,)),
        **dict.fromkeys(("monteclora_config", "use_bdlora", "velora_config"), (None,)),
    }
    ignored = frozenset({
        "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "layers_to_transform", "layers_pattern",
        "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_config", "megatron_core",
        "qalora_group_size", "ensure_weight_tying", "runtime_config",
    })  # fmt: skip

    def is_on(self, model: nn.Module, name: str) -> bool:
        return name in adapters(model)

    def take(self, model: nn.Module, name: str, shape: ModelConfig | None) -> StoredAdapter:
        naming, layers = LayerNaming(model, shape), adapted_layers(model, name)
        _refuse_own_attention(model, layers)
        places = {path: naming.place(path) for path in layers}
        pairs = {key: pair for path, layer in layers.items() for key, pair in split_pairs(layer, name, places[path])}
        tables = {key for path in layers if isinstance(layers[path], nn.Embedding) for key in places[path].theirs}
        _refuse_repeated(naming, tables)
        tensors: dict[str, Tensor] = {}
        for path, pair in pairs.items():
            kind, end = ("lora_embedding_", "") if path in tables else ("lora_", ".weight")
            key = f"{_PREFIX}{path}.{kind}"
            tensors |= {f"{key}A{end}": pair.a, f"{key}B{end}": pair.b}
        extras, modules = _extras(naming, pairs)
        first_factors = next(LORA.of(layer).factors[name] for layer in layers.values())
        config = {
            "lora_dropout": first_factors.dropout,
            "use_rslora": first_factors.rank_stabilized,
            "fan_in_fan_out": any(place.transposed for place in places.values()),
            "bias": "lora_only" if any(key.endswith(f"{_INSIDE}.bias") for key in extras) else "none",
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": targets(pairs, naming.modules),
            "modules_to_save": modules or None,
        }
        return StoredAdapter(config | rank_settings(pairs), tensors | extras)

    def put(self, model: nn.Module, stored: StoredAdapter, name: str, shape: ModelConfig | None) -> None:
        naming = LayerNaming(model, shape)
        pairs, extras = _read(stored)
        _refuse_other_base(naming, extras, adapters(model))
        layers: dict[str, dict[int, LoraPair]] = {}
        for theirs, pair in pairs.items():
            if theirs not in naming.layers:
                raise misfit(f"the adapter is for a layer {theirs}, which the model does not have")
            path, index = naming.layers[theirs]
            layers.setdefault(path, {})[index] = pair
        _refuse_own_attention(model, layers)
        dropout, rank_stabilized = float(stored.config.get("lora_dropout", 0)), bool(stored.config.get("use_rslora"))
        joined = {
            path: join_pairs(parts, naming.place(path), dropout, rank_stabilized) for path, parts in layers.items()
        }
        for path, (factors, a, b) in joined.items():
            _check_fit(path, model.get_submodule(path), factors, a, b)
        written = naming.fill(extras)
        attach(model, {path: factors for path, (factors, _, _) in joined.items()}, name)
        for path, (_, a, b) in joined.items():
            _fill(model.get_submodule(path), name, (a, b))
        for parameter in written:
            parameter.requires_grad_(bool(stored.config.get("modules_to_save")))


def _read(stored: StoredAdapter) -> tuple[dict[str, LoraPair], dict[str, Tensor]]:
    """Return factor pairs by exported layer, and fully trained parameters."""
    halves: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    for name, tensor in stored.tensors.items():
        inner = name.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(inner):
            halves.setdefault(match[1].replace(f"{_INSIDE}.", "."), {})[match[2]] = tensor
        else:
            extras[inner.replace(f"{_INSIDE}.", ".")] = tensor
    if not halves:
        raise IntegrityError("the adapter contains no factors", fix="fetch the folder again")
    pairs = {}
    for path, both in halves.items():
        rank, alpha = rank_and_alpha(stored.config, path)
        if both.keys() != {"A", "B"} or any(x.ndim != 2 for x in both.values()) or both["A"].shape[0] != rank:
            raise IntegrityError(
                f"the factors of {path!r} are not two matrices of rank {rank}, the rank in adapter_config.json",
                fix="fetch the folder again",
            )
        pairs[path] = LoraPair(both["A"], both["B"], alpha)
    return pairs, extras


def _check_fit(path: str, layer: nn.Module, factors: LoraFactors, a: Tensor, b: Tensor) -> None:
    in_size, out_size = widths(layer)
    out_size = sum(factors.sizes[index] for index in factors.chosen) if factors.sizes else out_size
    if (a.shape[1], b.shape[0]) != (in_size, out_size):
        raise misfit(
            f"the factors of {path!r} are for {a.shape[1]} by {b.shape[0]}, the layer is {in_size} by {out_size}"
        )


@torch.no_grad()
def _fill(layer: nn.Module, name: str, values: tuple[Tensor, Tensor]) -> None:
    for each, value in zip(parameter_names(name), values, strict=True):
        getattr(layer, each).copy_(value)


def _extras(naming: LayerNaming, pairs: Collection[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the fully trained tensors, and the exported modules that PEFT must save whole because they contain such
    tensors.
    """
    tensors: dict[str, Tensor] = {}
    modules: set[str] = set()
    for name in naming.packings:
        for module in naming.holders(name) if naming.parameters[name].requires_grad else ():
            if module not in pairs:
                modules.add(module)
                continue
            last = name.rpartition(".")[2]
            tensors[f"{module}{_INSIDE}.{last}"] = naming.values(module)[f"{module}.{last}"]
    for module in modules:
        if not module or any(path.startswith(f"{module}.") for path in pairs):
            raise RefusedError(
                f"PEFT would save {module or 'the model'} as a whole, but it contains adapted layers",
                fix="adapt no layer in it: choose another pattern for where",
            )
        tensors |= naming.values(module)
    return {f"{_PREFIX}{key}": value for key, value in tensors.items()}, sorted(modules)


def _refuse_own_attention(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise RefusedError for `nn.MultiheadAttention`, because peft (0.21 and earlier) adds the factors of `out_proj`
    twice."""
    for path in paths:
        around = model.get_submodule(path.rpartition(".")[0])
        if isinstance(model.get_submodule(path), nn.MultiheadAttention) or isinstance(around, nn.MultiheadAttention):
            raise RefusedError(
                f"{path!r} belongs to torch's own attention, where PEFT would apply the factors twice",
                fix="merge the adapter into the weights; or adapt other layers",
            )


def _refuse_repeated(naming: LayerNaming, tables: Collection[str]) -> None:
    for table in tables:
        if f"{table}.weight" in naming.repeated:
            raise RefusedError(
                f"several modules of the exported model use {table!r}; an adapter would change only one of them",
                fix="adapt no embedding of this family; or merge the adapter into the model",
            )


def _refuse_other_base(naming: LayerNaming, extras: Mapping[str, Tensor], others: Collection[str]) -> None:
    for name, value in extras.items() if others else ():
        present = naming.values(name.rpartition(".")[0]).get(name)
        if present is not None and not torch.equal(present, value.to(present)):
            raise RefusedError(
                f"the adapter would change {name!r} of the base, which is also the base of {', '.join(others)}",
                fix="remove the other adapters; or load this one onto another copy of the model",
            )
