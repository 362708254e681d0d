"""A folder in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`; and the base class of adapter
formats.

Pickled adapters (.bin) are never opened.
"""

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
    """Content of an adapter folder: settings and tensors under PEFT's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class AdapterFormat:
    """Format of one kind of adapter. `read` contains the names of settings that loading uses. `only` maps settings to
    their supported values. `ignored` contains the names of settings without effect in Thrifty. Any other setting that
    is on raises an error.
    """

    peft_type: ClassVar[str]
    read: ClassVar[frozenset[str]] = frozenset()
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    other_task: ClassVar[str | None] = None
    """PEFT's task type for a model without a matching task type."""

    def is_on(self, model: nn.Module, name: str) -> bool:
        """Return True if a model has an adapter of this kind and name."""
        raise NotImplementedError

    def take(self, model: nn.Module, name: str, shape: ModelConfig | None) -> StoredAdapter:
        """Return an adapter of a model in PEFT's layout. `shape` is required for Thrifty's own families, because their
        layers have other names in the exported folder."""
        raise NotImplementedError

    def put(self, model: nn.Module, stored: StoredAdapter, name: str, shape: ModelConfig | None) -> None:
        """Add a stored adapter to a model. Raise IntegrityError if the adapter does not fit the model."""
        raise NotImplementedError


def write_adapter(folder: Path, stored: StoredAdapter, dtype: torch.dtype | None = None) -> None:
    """Write an adapter folder; after an error no folder remains. Raise UsageError if the folder exists and is not
    empty."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in stored.tensors.items()}
    storages = [tensor.untyped_storage().data_ptr() for tensor in tensors.values()]
    for (name, tensor), storage in zip(tensors.items(), storages, strict=True):
        if storages.count(storage) > 1:  # the format stores each tensor separately
            tensors[name] = tensor.clone()
    with written_aside(folder) as aside:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        write_json(aside / CONFIG, dict(sorted(stored.config.items())))


_KINDS = {"lora_dropout": (int, float), **dict.fromkeys(("rank_pattern", "alpha_pattern"), (dict, type(None)))}
"""Required types of settings."""


def read_adapter(folder: Path, formats: Mapping[str, AdapterFormat]) -> StoredAdapter:
    """Return the content of a folder after a check of its settings. Raise UsageError for a folder without an adapter,
    with a kind not in `formats`, or with unknown settings. Raise RefusedError for unsupported settings. Raise
    IntegrityError for a damaged folder."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"'{folder}' has no {CONFIG}", fix="pass the folder of an adapter written by PEFT")
    config = read_json(folder / CONFIG)
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in formats:
        raise UsageError(
            f"'{folder / CONFIG}': peft_type {kind!r} is not supported", fix=did_you_mean(str(kind), formats)
        )
    _check(folder / CONFIG, config, formats[kind])
    return StoredAdapter(config, _read_tensors(folder))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise UsageError(
                f"'{folder}' has its weights in {pickles[0]}, a pickle, which can run any code when opened",
                fix="if you trust their origin, convert them to safetensors and pass that folder",
            )
        raise UsageError(f"'{folder}' has no {WEIGHTS}", fix="fetch the whole folder again")
    try:
        return load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise IntegrityError(f"'{folder / WEIGHTS}' is damaged: {error}", fix="fetch the file again") from error


def _check(path: Path, config: Config, form: AdapterFormat) -> None:
    known = form.read | form.only.keys() | form.ignored | _OF_EVERY_KIND
    for key, value in config.items():
        if key in form.only and value not in form.only[key]:
            raise RefusedError(
                f"'{path}' sets {key} = {value!r}, which is not supported", fix="train the adapter without it"
            )
        if key in _KINDS and not isinstance(value, _KINDS[key]):
            raise IntegrityError(f"'{path}': {key} is {value!r:.80}", fix="fetch the folder again")
        # settings of later versions of PEFT have no effect if they are off
        if key not in known and value not in (None, False, "", [], {}):
            raise UsageError(f"'{path}': there is no setting {key}", fix=did_you_mean(key, known))
