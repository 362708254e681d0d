"""Conversion of a model, a batch and a loss in any form to the run whose step `estimate` counts."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten

from thrifty.composition.compose import BaseRun
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import UsageError, did_you_mean, spelled
from thrifty.core.tensor_tracing import storage_bytes
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import import_function, is_function_name
from thrifty.data.text.token_windows import PackedTokens
from thrifty.interface.recipe_arguments import is_mixture, names_object, recipe
from thrifty.models.families import FAMILIES, assemble
from thrifty.models.hf_folder import read_config, weight_files
from thrifty.models.model_presets import PRESETS, nearest_model
from thrifty.objectives import find_objective
from thrifty.objectives.embedding_loss import objective_of
from thrifty.objectives.user_loss import UserFunction, loss_of_output
from thrifty.recipes import RECIPES
from thrifty.training.run_setup import prepare_run

EXAMPLES, LENGTH = 8, 512
"""Default number of examples in a batch, and of tokens per example."""


@dataclass(frozen=True)
class EstimatedRun:
    """A run without techniques, the size of its batch in bytes, and the bytes of its tensors in this process."""

    plain: BaseRun
    batch_bytes: float
    resident: float = 0.0
    notes: tuple[str, ...] = ()


class OneBatch(BatchSource):
    """Batch source with the same batch at every step. Its fields are the batch's tensors with one row per example."""

    def __init__(self, leaves: Mapping[str, Tensor]):
        self.leaves, self.batch = leaves, len(next(iter(leaves.values())))

    def rows(self, step: int, start: int, stop: int) -> Batch:
        fields = {name: leaf[start:stop] for name, leaf in self.leaves.items()}
        return Batch(fields, torch.full((stop - start,), 1 / self.batch))


def estimated_run(
    model: Any, batch: Any, loss: UserFunction | str | None, data: Any, length: int | None
) -> EstimatedRun:
    """Return the run for a model in any form that `thrifty.estimate` accepts. Raises UsageError for other types."""
    count = batch if isinstance(batch, int) else None
    is_own_batch = batch is not None and count is None
    if count is not None and count < 1:
        raise UsageError(f"the batch has {count} examples, but needs at least 1", fix="batch=8")
    if isinstance(model, str) and is_function_name(model):
        model = import_function(model)
    if isinstance(model, str | Path):
        return _of_name(model, batch if is_own_batch else None, loss, count, data, length)
    if hasattr(model, "model_type") and hasattr(model, "to_diff_dict"):
        return _of_config(model, batch if is_own_batch else None, loss, count, length)
    if not callable(model):
        raise UsageError(
            f"{model!r:.80} is neither a module nor a function that builds one",
            fix="pass the module itself, a preset, a folder with config.json or a config of transformers",
        )
    if data is not None and not is_own_batch:
        return _of_recipe(model, loss, count, data, length)
    own = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return _of_batch(UserObjects(model).build_model, batch if is_own_batch else None, loss, own)


def _of_name(
    model: str | Path, batch: Any, loss: UserFunction | str | None, count: int | None, data: Any, length: int | None
) -> EstimatedRun:
    """Return the run for a preset name, a model folder or a config.json."""
    if (folder := _model_folder(model)) is None:
        name = _preset(model)
        if batch is not None:
            return _of_batch(partial(assemble, PRESETS[name]), batch, loss)
        if data is None:
            return _of_preset(name, count, length)
        return _of_recipe(name, loss or FAMILIES[PRESETS[name].style].task, count, data, length)
    if data is not None and batch is None and _has_weights(folder):
        return _of_recipe(folder, loss, count, data, length)
    run = _of_config(_config_of(folder), batch, loss, count, length)
    if data is None:
        return run
    unread = f"{str(data)!r} is not read, because '{folder}' has no weights and no tokenizer"
    return replace(run, notes=(*run.notes, unread))


def _of_batch(
    build: Callable[[], nn.Module],
    batch: Any,
    loss: UserFunction | str | None,
    own: Sequence[Tensor] = (),
    notes: tuple[str, ...] = (),
) -> EstimatedRun:
    if batch is None:
        raise UsageError("no batch was passed", fix="estimate(model, batch, loss=loss); or data=…")
    if isinstance(loss, str):
        raise UsageError(
            f"the objective {loss!r} builds its own batches", fix="pass data=… instead of batch; or loss=FUNCTION"
        )
    if loss is None and not isinstance(_plain(batch), Mapping):
        raise UsageError(
            f"without a loss, the batch must be a dict of model arguments, not a {type(batch).__name__!r}",
            fix="pass loss=, a function of (model, batch)",
        )
    leaves, structure = tree_flatten(_plain(batch))
    tensors = {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    first = next((leaf for leaf in tensors.values() if leaf.ndim), None)
    if first is None or not len(first):
        what = "no tensor with one row per example" if first is None else "no examples"
        raise UsageError(f"the batch has {what}", fix="pass tensors of shape (examples, …), in dicts, lists or tuples")
    rows = {name: _present(leaf) for name, leaf in tensors.items() if leaf.ndim and len(leaf) == len(first)}
    constant = [rows.get(str(place), leaf) for place, leaf in enumerate(leaves)]

    def assembled(part: Batch) -> Any:
        return tree_unflatten([part.fields.get(str(place), leaf) for place, leaf in enumerate(constant)], structure)

    objective = objective_of(loss or loss_of_output, assembled)
    everything = [*own, *tensors.values()]
    here = [each for each in everything if not _is_shape_alone(each) and each.device.type == "cpu"]
    has_values = not any(map(_is_shape_alone, everything))
    plain = BaseRun(build, OneBatch(rows), objective, has_values=has_values)
    return EstimatedRun(plain, storage_bytes(tensors.values()), storage_bytes(here), notes)


def _plain(batch: Any) -> Any:
    """Return a batch with plain dictionaries instead of mappings such as a tokenizer's `BatchEncoding`."""
    return dict(batch) if isinstance(batch, UserDict) else batch


def _is_shape_alone(tensor: Tensor) -> bool:
    return is_lazy(tensor) or tensor.is_meta or isinstance(tensor, FakeTensor)


def _present(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if _is_shape_alone(leaf) else leaf


def _model_folder(model: str | Path) -> Path | None:
    """Return the folder of a model or of a config.json, or None if `model` is not a path."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    return path if path.is_dir() else None


def _preset(model: str | Path) -> str:
    name = str(model)
    if name in RECIPES:
        preset = RECIPES[name]().model.preset
        typed, call = f"thrifty estimate {preset}", f'thrifty.estimate("{preset}", batch)'
        whole = spelled(f"thrifty explain {name}", f'thrifty.explain("{name}")')
        raise UsageError(f"{name!r} is a recipe, not a model", fix=f"{spelled(typed, call)}; or {whole}")
    if name not in PRESETS:
        raise UsageError(f"{name!r} is neither a preset nor a folder with config.json", fix=nearest_model(name))
    return name


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except UsageError:
        return False


def _config_of(folder: Path) -> Any:
    content = read_config(folder)
    transformers = _transformers()
    kind = content.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"'{folder / 'config.json'}': model_type {kind!r} is not known to the installed transformers",
            fix=did_you_mean(str(kind), transformers.CONFIG_MAPPING.keys()),
        )
    config = transformers.CONFIG_MAPPING[kind].from_dict(content)
    config.dtype = torch.float32
    return config


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "models of a config require the package transformers, which is not installed",
            fix="pip install 'thrifty[huggingface]'",
        ) from error
    return transformers


AUTO = (
    "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageClassification",
)  # fmt: skip
"""Auto classes that are tried in this order if a config names no architecture."""


def _of_config(
    config: Any, batch: Any, loss: UserFunction | str | None, count: int | None, length: int | None
) -> EstimatedRun:
    """Return the run of a `transformers` config with random weights. Without a batch, examples are random."""
    transformers = _transformers()
    name = next((name for name in getattr(config, "architectures", None) or () if hasattr(transformers, name)), None)
    kind = getattr(transformers, name) if name else None
    if kind is None:
        kind = next((k for k in (getattr(transformers, a) for a in AUTO) if type(config) in k._model_mapping), None)
    if kind is None:
        raise UsageError(
            f"transformers has no model with a loss for the config {type(config).__name__!r}", fix="pass the model"
        )
    build = partial(kind._from_config if name else kind.from_config, config)
    if batch is not None:
        return _of_batch(build, batch, loss)
    count = count or EXAMPLES
    given = f"a batch of {count} random examples"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        side = config.image_size if isinstance(config.image_size, Sequence) else [config.image_size] * 2
        images = torch.rand(count, getattr(config, "num_channels", 3), *side)
        labels = torch.zeros(count, dtype=torch.long)
        return _of_batch(build, {"pixel_values": images, "labels": labels}, loss, notes=(f"{given} of {side}",))
    if not hasattr(text, "vocab_size"):
        raise UsageError(
            f"{type(config).__name__!r} is a config of a model without text or image inputs",
            fix="pass a batch: estimate(config, batch)",
        )
    most = getattr(text, "max_position_embeddings", None) or LENGTH
    size = length or min(LENGTH, most)
    tokens = torch.randint(text.vocab_size, (count, size), generator=torch.Generator().manual_seed(0))
    return _of_batch(build, {"input_ids": tokens, "labels": tokens.clone()}, loss, notes=(f"{given} of {size} tokens",))


def _of_recipe(
    model: Any, loss: UserFunction | str | None, count: int | None, data: Any, length: int | None
) -> EstimatedRun:
    """Return the run that `thrifty.train` would start with the data."""
    is_named = is_mixture(data) or (isinstance(data, str | Path) and not names_object(data, is_data=True))
    held_out = None if is_named else data
    chosen = recipe(model, data, held_out=held_out, loss=loss, batch=count or EXAMPLES, device="cpu")
    if length is not None:
        chosen = replace(chosen, data=replace(chosen.data, length=length))
    plain = prepare_run(chosen, steps=2, quiet=True).run.plain
    return EstimatedRun(plain, storage_bytes(plain.source.at(0).fields.values()))


@dataclass
class PublishedTokens:
    """Stand-in for a tokenizer whose vocabulary size is known. Special tokens have the last ids."""

    vocabulary: int
    end_of_text: int = 0
    numbers: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def special(self) -> frozenset[int]:
        return frozenset({self.end_of_text, *self.numbers.values()})

    def number_of(self, *names: str) -> int:
        return self.numbers.setdefault(names, self.vocabulary - 1 - len(self.numbers))


def _of_preset(name: str, count: int | None, length: int | None) -> EstimatedRun:
    """Return the run of a preset at its published size, with random examples."""
    shape = PRESETS[name]
    task, count = FAMILIES[shape.style].task, count or EXAMPLES
    build = partial(assemble, shape)
    if task == "classification":
        images, labels = torch.rand(count, shape.channels, shape.image, shape.image), torch.zeros(count).long()
        source: BatchSource = OneBatch({"inputs": images, "labels": labels})
        plain = BaseRun(build, source, find_objective(task))
        given = f"{count} random images of {shape.image} x {shape.image}"
    elif task in ("next_token", "masked_token", "sequence_to_sequence"):
        size = length or min(LENGTH, shape.length)
        source = PackedTokens(np.arange(count * size + 1) % (shape.vocabulary - 1), size, count, seed=0)
        plain = BaseRun(build, source, find_objective(task).with_tokenizer(PublishedTokens(shape.vocabulary), size))
        given = f"{count} random examples of {size} tokens"
    else:
        raise UsageError(f"{name} ({task}) requires data", fix=f'estimate({name!r}, data="…", batch={count})')
    batch_bytes = storage_bytes(plain.objective.examples(source.at(0)).fields.values())
    return EstimatedRun(plain, batch_bytes, notes=(f"a batch of {given}",))
