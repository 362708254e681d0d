"""Adapters in files of other people: PEFT's folders, written and read without `peft`.

A kind of adapter is one class (an `AdapterFormat`), found here by the `peft_type` that its folders state.
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
    """Write an adapter of a model alone, so that PEFT loads it onto the same base.

    A model of our own families needs its `shape`: the names are then those of the folder it is exported to. `base` is
    where that folder or the model came from, for `base_model_name_or_path`. Raises UsageError where the model has no
    such adapter or the folder holds something, RefusedError for what PEFT's layout has no place for.
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
    raise UsageError(f"the model has no adapter {name!r} that PEFT has a format for", fix="put one on it first")


def load_adapter(
    model: nn.Module, folder: Path | str, name: str = "default", *, shape: ModelConfig | None = None
) -> None:
    """Put the adapter of a folder on a model, under this name and active; from then on it is like one that was trained
    here. The base is frozen.

    Raises IntegrityError where the folder is damaged or was made for another model, UsageError or RefusedError for
    settings that are not followed.
    """
    stored = read_adapter(Path(folder), FORMATS)
    FORMATS[stored.config["peft_type"]].put(_inside(model), stored, name, shape)


def _inside(model: nn.Module) -> nn.Module:
    return model.lm if isinstance(model, HuggingFaceModel) else model


_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
_TASKS |= {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
_HEADS = ("classifier", "score")
"""How the names of modules end that PEFT saves whole wherever the task is to classify."""
_OUR_TASKS = {"next_token": "CAUSAL_LM", "sequence_to_sequence": "SEQ_2_SEQ_LM"}


def _task(model: nn.Module, saved: Collection[str]) -> str | None:
    """PEFT's word for what a model is for, by its own word or the name of its class; none where with that word PEFT
    would ask for a head that is not among what is `saved`, or for tokens that the model does not take."""
    task = next((task for end, task in _TASKS.items() if type(model).__name__.endswith(end)), None)
    if task == "SEQ_2_SEQ_LM":
        both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
        task = task if both and getattr(model, "main_input_name", "input_ids") == "input_ids" else None
    if task in ("SEQ_CLS", "TOKEN_CLS"):
        heads = {name for name, _ in model.named_modules() if name.endswith(_HEADS)}
        task = task if heads <= {*saved} else None
    return _OUR_TASKS.get(str(getattr(model, "task", "")), task)
