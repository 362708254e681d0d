"""`export`: a trained model as a Hugging Face folder, its adapter as a folder of PEFT, or its masks as a file."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType

from thrifty.core.model_spec import ImageModelSpec, PairModelSpec
from thrifty.core.run_notes import collect_notes
from thrifty.data.run_metadata import read_model_spec
from thrifty.experiments.mask_export import export_masks
from thrifty.interface.run_reports import run_folder
from thrifty.modeling.module_surgery import find_blocks
from thrifty.models import export_model, shape_for
from thrifty.models.pad_pruned import FILLED_UP
from thrifty.peft_format import save_adapter
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.training.trained_model import Adapters, load_trained_model

Part = Literal["adapter", "base", "masks"]
ADAPTERS: dict[Part | None, Adapters] = {None: "merged", "adapter": "kept", "base": "left out"}


@dataclass(frozen=True, repr=False)
class ExportedModel(PrintedResult):
    """The files of an exported model."""

    run: str
    folder: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What a family's configuration cannot say, and how it was exported instead."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        return lines(*self.notes, f"{self.folder}: {', '.join(self.files)}")


@dataclass(frozen=True, repr=False)
class ExportedMasks(PrintedResult):
    """The masks of a sparse run as a file that another run can start from."""

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
    step: int | None = None,
    raw_weights: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    part: Part | None = None,
) -> ExportedModel | ExportedMasks:
    """Write the model of a run as a Hugging Face folder: config.json, safetensors, and the tokenizer, or what images
    must go through. Adapters are merged, gains folded in.

    `run` is what `thrifty.train` returned, a run folder, or its name under ./runs; `step` names a checkpoint other than
    the newest. `raw_weights` takes the weights in training where the run judged an average of them. `part` writes the
    adapter alone in PEFT's layout, the "base" that it was trained on, or the "masks" of a sparse run as a file.

    Raises UsageError for a folder that has files: nothing is overwritten.

    Example::

        thrifty.export("runs/mine", "exported", dtype="bfloat16")
    """
    path, target = run_folder(run), Path(folder)
    if part == "masks":
        density, sha256 = export_masks(path, target, step)
        return ExportedMasks(str(path), str(target), density, sha256)
    model, recipe = load_trained_model(path, step, raw_weights, adapters=ADAPTERS[part])
    ends, number_format = read_model_spec(path, recipe.data.length), getattr(torch, dtype)
    shape = shape_for(ends, recipe.model)
    if shape is not None:
        shape = replace(shape, depth=len(find_blocks(model)[1]))
    with collect_notes() as notes:
        if part == "adapter":
            save_adapter(model, target, shape=shape, base=recipe.model.folder or None, dtype=number_format)
        elif isinstance(ends, ImageModelSpec):
            export_model(model, shape, target, dtype=number_format, images=ends)
        else:
            images = ends.images if isinstance(ends, PairModelSpec) else None
            export_model(model, shape, target, path / "tokenizer.json", number_format, images)
    files = sorted(file.name for file in target.iterdir())
    return ExportedModel(str(path), str(target), tuple(files), tuple(text for text in notes if FILLED_UP in text))
