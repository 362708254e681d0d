"""Prompts and prefixes in PEFT's format: one tensor, `prompt_embeddings`."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError, class_name
from thrifty.modeling.adapter_base import names_ending, train_only
from thrifty.modeling.caught_attention import CaughtSite
from thrifty.modeling.module_surgery import find_stacks
from thrifty.modeling.transformers_attention import TransformersSite
from thrifty.models.families import FAMILIES
from thrifty.models.model_config import ModelConfig
from thrifty.peft_format.adapter_folder import AdapterFormat, StoredAdapter
from thrifty.techniques.adapters.prefix_tuning import (
    PrefixSite,
    body_of,
    find_prefix_sites,
    prefix_of,
    prepend_prefix,
    set_prefixes,
)
from thrifty.techniques.adapters.prompt_tuning import add_prompt, feeding_tables

_TENSOR = "prompt_embeddings"
_TASKS = {"next_token": "CAUSAL_LM", "sequence_to_sequence": "SEQ_2_SEQ_LM", "masked_token": "FEATURE_EXTRACTION"}


class _VirtualTokens(AdapterFormat):
    """Base class of the prompt format and the prefix format. A model has at most one set of virtual tokens, under
    PEFT's default adapter name.
    """

    last_words: ClassVar[tuple[str, ...]]
    """Last components of the adapter's parameter names."""
    read = frozenset({"num_virtual_tokens"})
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "num_transformer_submodules": (None, 1),
        "modules_to_save": (None, []),
    }
    ignored = frozenset({"token_dim", "num_attention_heads", "num_layers"})
    other_task = "FEATURE_EXTRACTION"  # without a task type PEFT would load virtual tokens and not use them

    def is_on(self, model: nn.Module, name: str) -> bool:
        return name == "default" and bool(names_ending(model, *self.last_words))

    def take(self, model: nn.Module, name: str, shape: ModelConfig | None) -> StoredAdapter:
        values, heads = self.values(model)
        stacks = find_stacks(model)
        blocks = [*stacks.values()][-1]
        task = {"task_type": _TASKS[FAMILIES[shape.style].task]} if shape is not None else {}
        config = {
            "num_virtual_tokens": len(values),
            "num_transformer_submodules": 1,
            "num_layers": len(blocks),
            "num_attention_heads": heads,
            "inference_mode": True,
        }
        return StoredAdapter(task | config | self.settings(values, len(blocks)), {_TENSOR: values})

    def put(self, model: nn.Module, stored: StoredAdapter, name: str, shape: ModelConfig | None) -> None:
        if name != "default":
            raise RefusedError(f"virtual tokens have no name, but {name!r} was passed", fix="leave the name out")
        if names_ending(model, "prompt", "prefix", "prefix_out"):
            raise UsageError("the model has virtual tokens already", fix="load them onto another copy of the model")
        values, count = stored.tensors.get(_TENSOR), stored.config.get("num_virtual_tokens")
        if values is None or values.ndim != 2 or len(values) != count:
            raise IntegrityError(
                f"the adapter has no {_TENSOR} of {count} rows, the number in adapter_config.json",
                fix="fetch the folder again",
            )
        self.write_rows(model, values)
        train_only(model, names_ending(model, *self.last_words))

    @abstractmethod
    def values(self, model: nn.Module) -> tuple[Tensor, int]:
        """Return the virtual-token rows in PEFT's layout, and the number of attention heads (1 for prompts)."""

    @abstractmethod
    def settings(self, values: Tensor, blocks: int) -> dict[str, Any]:
        """Return additional settings that PEFT requires."""

    @abstractmethod
    def write_rows(self, model: nn.Module, values: Tensor) -> None:
        """Write virtual-token rows to a model. Raise IntegrityError if the rows are for another model."""


class PromptFormat(_VirtualTokens):
    peft_type = "PROMPT_TUNING"
    last_words = ("prompt",)
    ignored = _VirtualTokens.ignored | {
        "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs",
    }  # fmt: skip

    def values(self, model: nn.Module) -> tuple[Tensor, int]:
        return next(iter(feeding_tables(model).values())).prompt.detach(), 1

    def settings(self, values: Tensor, blocks: int) -> dict[str, Any]:
        return {"token_dim": values.shape[1], "prompt_tuning_init": "RANDOM"}

    def write_rows(self, model: nn.Module, values: Tensor) -> None:
        table = next(iter(feeding_tables(model).values())).weight
        _refuse_misfit(values.shape[1], table.shape[1])
        add_prompt(model, values.to(table.device, table.dtype, copy=True))


class PrefixFormat(_VirtualTokens):
    peft_type = "PREFIX_TUNING"
    last_words = ("prefix", "prefix_out")
    # PEFT stores the outputs of a projection network, so loading does not need the network
    ignored = _VirtualTokens.ignored | {"prefix_projection", "encoder_hidden_size", "init_weights"}

    def values(self, model: nn.Module) -> tuple[Tensor, int]:
        places = _places(model)
        if len({(place.heads, place.head_width) for place in places.values()}) > 1:
            raise RefusedError(
                f"PEFT stores prefixes of one width for all blocks; the widths in {class_name(model)} differ",
                fix="use LoRA, which PEFT stores for any model",
            )
        with torch.no_grad():
            rows = torch.cat([prefix_of(place.module, body_of(model)) for place in places.values()], 1)
        return rows, next(iter(places.values())).heads

    def settings(self, values: Tensor, blocks: int) -> dict[str, Any]:
        return {"token_dim": values.shape[1] // (2 * blocks), "prefix_projection": False}

    def write_rows(self, model: nn.Module, values: Tensor) -> None:
        places = _places(model)
        widths = [2 * place.heads * place.head_width for place in places.values()]
        _refuse_misfit(values.shape[1], sum(widths))
        set_prefixes(model, places, len(values), hidden=0, seed=0)
        for place, rows in zip(places.values(), values.split(widths, 1), strict=True):
            with torch.no_grad():
                place.module.prefix.copy_(rows)
        prepend_prefix(model, places, len(values))


def _places(model: nn.Module) -> Mapping[str, PrefixSite]:
    places = find_prefix_sites(model)
    stacks = [*find_stacks(model).values()]
    is_decoder = getattr(model, "task", "next_token") == "next_token"
    is_catching = any(isinstance(place.attention, CaughtSite | TransformersSite) for place in places.values())
    if len(stacks) > 1 or len(places) != len(stacks[0]) or not is_decoder or is_catching:
        raise RefusedError(
            f"PEFT stores prefixes for the blocks of a decoder, not of {class_name(model)}",
            fix="use LoRA, which PEFT stores for any model",
        )
    return places


def _refuse_misfit(width: int, model_width: int) -> None:
    if width != model_width:
        raise IntegrityError(
            f"{_TENSOR} is for a model of width {width}, but the model has width {model_width}",
            fix="load it onto the base model on which it was trained",
        )
