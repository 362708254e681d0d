"""A folder in PEFT's layout, `adapter_config.json` and `adapter_model.safetensors`, and what a kind of adapter must be
able to do to be kept in one. Pickled adapters (.bin) are never opened."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError, UsageError, did_you_mean
from thrifty.models.hf_folder import read_json, write_json, written_aside
from thrifty.models.model_config import ModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_EVERY_KIND = frozenset(
    {"peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode"}
)
Config = Mapping[str, Any]


@dataclass(frozen=True)
class StoredAdapter:
    """What a folder holds: settings in PEFT's words, and tensors under PEFT's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class AdapterFormat:
    """One kind of adapter. `read` are the settings that loading looks at, `only` those with values it can live with,
    `ignored` those that change nothing here; any other is refused where it is set."""

    peft_type: ClassVar[str]
    read: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    other_task: ClassVar[str | None] = None
    """PEFT's word for what a model is for, where it has none that fits."""

    def is_on(self, model: nn.Module, name: str) -> bool:
        """Whether a model has an adapter of this kind and name."""
        raise NotImplementedError

    def take(self, model: nn.Module, name: str, shape: ModelConfig | None) -> StoredAdapter:
        """An adapter of a model as PEFT would store it. `shape` is given for a model of our own families, whose
        layers go by other names in the folder that they are exported to."""
        raise NotImplementedError

    def put(self, model: nn.Module, stored: StoredAdapter, name: str, shape: ModelConfig | None) -> None:
        """Put a stored adapter on a model. Raises IntegrityError where it does not fit."""
        raise NotImplementedError


def write_adapter(folder: Path, stored: StoredAdapter, dtype: torch.dtype | None = None) -> None:
    """Complete or not at all. Raises UsageError for a folder with something in it."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in stored.tensors.items()}
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    for (name, tensor), storage in zip(tensors.items(), storages, strict=True):
        if storages.count(storage) > 1:  # the format gives each tensor bytes of its own
            tensors[name] = tensor.clone()
    with written_aside(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        write_json(aside / CONFIG, dict(sorted(stored.config.items())))


_KINDS = {"lora_dropout": (int, float), **dict.fromkeys(("rank_pattern", "alpha_pattern"), (dict, type(None)))}
"""Types that settings must have."""


def read_adapter(folder: Path, formats: Mapping[str, AdapterFormat]) -> StoredAdapter:
    """What a folder holds, its settings checked. Raises UsageError for a folder that is none, of a kind that is not
    among `formats`, or with settings nobody knows; RefusedError for settings that are not followed here; IntegrityError
    for damage."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{folder} has no {CONFIG}", fix="give the folder of an adapter, as PEFT writes it")
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in formats:
        raise UsageError(f"{folder / CONFIG}: peft_type is {kind!r}", fix=did_you_mean(str(kind), formats))
    _check(folder / CONFIG, config, formats[kind])
    return StoredAdapter(config, _read_tensors(folder))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise UsageError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run any code when opened",
                fix="convert them to safetensors where you trust their origin, then give that folder",
            )
        raise UsageError(f"{folder} has no {WEIGHTS}", fix="fetch the whole folder again")
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"{folder / WEIGHTS} is damaged: {error}", fix="fetch the file again") from error


def _check(path: Path, config: Config, form: AdapterFormat) -> None:
    known = form.read | form.only.keys() | form.ignored | _OF_EVERY_KIND
    for key, value in config.items():
        if key in form.only and value not in form.only[key]:
            raise RefusedError(
                f"{path} sets {key} = {value!r}, which is not followed here", fix="train the adapter without it"
            )
        if key in _KINDS and not isinstance(value, _KINDS[key]):
            raise IntegrityError(f"{path}: {key} is {value!r:.80}", fix="fetch the folder again")
        # what a later version of PEFT can do more is of no matter where it is off
        if key not in known and value not in (None, False, "", [], {}):
            raise UsageError(f"{path}: there is no setting {key}", fix=did_you_mean(key, known))
