"""Adapters in PEFT's folder format, written and read without `peft`.

Each kind of adapter has a subclass of `AdapterFormat`, selected by `peft_type` in adapter_config.json.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn

from thrifty.core.errors import UsageError
from thrifty.models.hf_loader import HuggingFaceModel
from thrifty.models.model_config import ModelConfig
from thrifty.peft_format.adapter_folder import AdapterFormat, StoredAdapter, read_adapter, write_adapter
from thrifty.peft_format.lora_format import LoraFormat
from thrifty.peft_format.prompt_format import PrefixFormat, PromptFormat

FORMATS: dict[str, AdapterFormat] = {form.peft_type: form for form in (LoraFormat(), PromptFormat(), PrefixFormat())}


def save_adapter(
    model: nn.Module,
    folder: Path | str,
    name: str = "default",
    *,
    shape: ModelConfig | None = None,
    base: str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write one adapter of a model so that PEFT loads it onto the same base.

    A model of Thrifty's own families requires its `shape`; the file then has the parameter names of the exported model.
    `base` is the path or name of the base model, which is written as `base_model_name_or_path`. Raise UsageError if the
    model lacks the adapter or the folder is not empty. Raise RefusedError for parts that PEFT's format cannot store.
    """
    model = _inside(model)
    for form in FORMATS.values():
        if form.is_on(model, name):
            stored = form.take(model, name, shape)
            origin = base or getattr(getattr(model, "config", None), "_name_or_path", None) or None
            task = _task(model, stored.config.get("modules_to_save") or []) or form.other_task
            config = {"peft_type": form.peft_type, "task_type": task, "base_model_name_or_path": origin}
            write_adapter(Path(folder), StoredAdapter(config | stored.config, stored.tensors), dtype)
            return
    raise UsageError(
        f"the model has no adapter {name!r} in a format of PEFT", fix="export without --part; or train with --with lora"
    )


def load_adapter(
    model: nn.Module, folder: Path | str, name: str = "default", *, shape: ModelConfig | None = None
) -> None:
    """Load an adapter folder onto a model under `name`, activate the adapter, and freeze the base. The loaded adapter
    behaves like an adapter trained with Thrifty. Raise IntegrityError if the folder is damaged or for another model.
    Raise UsageError or RefusedError for unsupported settings."""
    stored = read_adapter(Path(folder), FORMATS)
    FORMATS[stored.config["peft_type"]].put(_inside(model), stored, name, shape)


def _inside(model: nn.Module) -> nn.Module:
    return model.lm if isinstance(model, HuggingFaceModel) else model


_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
_TASKS |= {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
_HEADS = ("classifier", "score")
"""Last name components of modules that PEFT saves whole for every classification task."""
_OUR_TASKS = {"next_token": "CAUSAL_LM", "sequence_to_sequence": "SEQ_2_SEQ_LM"}


def _task(model: nn.Module, saved: Collection[str]) -> str | None:
    """Return PEFT's task type for a model, from its task or class name. Return None if PEFT could not load the adapter
    with that type, because PEFT requires token inputs or a classification head among the `saved` modules.
    """
    task = next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None)
    if task == "SEQ_2_SEQ_LM":
        both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        task = task if both and getattr(model, "main_input_name", "input_ids") == "input_ids" else None
    if task in ("SEQ_CLS", "TOKEN_CLS"):
        heads = {name for name, _ in model.named_modules() if name.endswith(_HEADS)}
        task = task if heads <= {*saved} else None
    return _OUR_TASKS.get(str(getattr(model, "task", "")), task)
