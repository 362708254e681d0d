"""`export`: write a trained model as a Hugging Face folder, its adapter as a PEFT folder, or its masks as a file."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType
from torch import nn

from thrifty.core.errors import for_reader
from thrifty.core.model_spec import ImageModelSpec, PairModelSpec, UserModelSpec
from thrifty.core.plain_values import to_data
from thrifty.core.recipe import Recipe
from thrifty.core.run_notes import collect_notes
from thrifty.core.user_objects import BuildModel
from thrifty.data.run_metadata import read_model_spec, unchanged_tokenizer
from thrifty.data.tokenizer import TOKENIZER
from thrifty.experiments.mask_export import export_masks
from thrifty.interface.loaded_model import own_model
from thrifty.interface.model_card import write_model_card
from thrifty.modeling.module_surgery import find_blocks
from thrifty.models import export_model, export_own_model, shape_for
from thrifty.models.hf_config import write_config
from thrifty.models.hf_folder import write_tokenizer
from thrifty.models.model_builder import folder_config
from thrifty.models.pad_pruned import FILLED_UP
from thrifty.peft_format import save_adapter
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.reporting.run_record import run_folder
from thrifty.training.checkpoint_index import CheckpointChoice, named_steps
from thrifty.training.trained_model import Adapters, load_trained_model

Part = Literal["adapter", "base", "masks"]
ADAPTERS: dict[Part | None, Adapters] = {None: "merged", "adapter": "kept", "base": "left out"}


@dataclass(frozen=True, repr=False)
class ExportedModel(PrintedResult):
    """Folder and files of an exported model."""

    run: str
    folder: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Settings that the configuration format cannot express, and how the export represents them."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        return lines(*self.notes, f"{self.folder}: {', '.join(self.files)}")


@dataclass(frozen=True, repr=False)
class ExportedMasks(PrintedResult):
    """Masks of a sparse run in a file, for use in another run."""

    run: str
    file: str
    density: float
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        option = f"--with 'sparsity.mask_from_file:file=\"{self.file}\",sha256={self.sha256}'"
        return lines(f"{self.file}: density {self.density:.4g}", option)


def export(
    run: Any,
    folder: str | Path,
    *,
    checkpoint: CheckpointChoice = "last",
    raw_weights: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    part: Part | None = None,
    model: nn.Module | BuildModel | str | None = None,
) -> ExportedModel | ExportedMasks:
    """Write the model of a run as a Hugging Face folder: config.json, safetensors, tokenizer or image preprocessor.

    Adapters and residual gains are merged into the weights. A model of `transformers` keeps its own format. Your own
    `model` is written as model.safetensors (its state dict) and model.json (the function that built it). A model card,
    README.md, describes data, recipe and held-out results; its license is left to you.

    Args:
        run: Run, run folder, or its name under ./runs.
        checkpoint: "best" (best held-out value), "last" or the step of a checkpoint.
        raw_weights: True to export the trained weights instead of their average, if the run evaluated the average.
        part: "adapter" in PEFT format, its "base" model, or the "masks" of a sparse run as a file.
        model: Your own model, if the run trained it.

    Raises UsageError if the folder contains files.

    Example::

        thrifty.export("runs/mine", "exported", dtype="bfloat16")
    """
    path, target = run_folder(run), Path(folder)
    if part == "masks":
        density, sha256 = export_masks(path, target, checkpoint)
        return ExportedMasks(str(path), str(target), density, sha256)
    objects = own_model(run, model)
    better = _better_checkpoint(path, checkpoint)
    trained, recipe = load_trained_model(path, checkpoint, raw_weights, adapters=ADAPTERS[part], objects=objects)
    steps = named_steps(path / "checkpoints")  # after loading, which sets damaged checkpoints aside
    step = checkpoint if isinstance(checkpoint, int) else steps[checkpoint]
    with collect_notes() as notes:
        _write(path, target, trained, recipe, part, getattr(torch, dtype))
    if part != "base":  # the held-out results belong to the model with its adapter
        write_model_card(path, target, recipe, step, is_adapter=part == "adapter", is_raw=raw_weights)
    filled = tuple(text for text in notes if FILLED_UP in text)
    return ExportedModel(str(path), str(target), _files(target), (*better, *filled))


def _write(
    run: Path, target: Path, trained: nn.Module, recipe: Recipe, part: Part | None, number_format: torch.dtype
) -> None:
    """Write a trained model, or its adapter."""
    if recipe.model.build:
        if part == "adapter":
            save_adapter(trained, target, dtype=number_format)
        else:
            export_own_model(trained, to_data(recipe.model), target, number_format)
        return
    ends = read_model_spec(run, recipe)
    shape = shape_for(ends, recipe.model)
    if shape is not None:
        shape = replace(shape, depth=len(find_blocks(trained)[1]))
    if part == "adapter":
        save_adapter(trained, target, shape=shape, base=recipe.model.folder or None, dtype=number_format)
        if (tokenizer := run / TOKENIZER).is_file():
            base = folder_config(recipe.model) or (write_config(shape) if shape else {})
            types = base.get("type_vocab_size", 0)
            write_tokenizer(target, tokenizer, recipe.data.length, getattr(trained, "task", ""), types)
    elif isinstance(ends, ImageModelSpec):
        export_model(trained, shape, target, dtype=number_format, images=ends)
    else:
        images = ends.images if isinstance(ends, PairModelSpec) else None
        tokenizer = None if isinstance(ends, UserModelSpec) else run / TOKENIZER
        base = Path(recipe.model.folder) if folder_config(recipe.model) else None
        if base and tokenizer and not unchanged_tokenizer(base / TOKENIZER, tokenizer.read_text(encoding="utf-8")):
            base = None  # its generation settings have ids of other tokens
        export_model(trained, shape, target, tokenizer, number_format, images, base)


def _better_checkpoint(run: Path, checkpoint: CheckpointChoice) -> tuple[str, ...]:
    """Return a note if the newest checkpoint is exported although an earlier one has a better held-out value."""
    steps = named_steps(run / "checkpoints")
    if checkpoint != "last" or steps.get("best") in (None, steps.get("last")):
        return ()
    choice = for_reader("--checkpoint best")
    return (f"step {steps['last']:,} is exported; step {steps['best']:,} has a better held-out value: {choice}",)


def _files(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.iterdir()))
