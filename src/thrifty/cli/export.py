"""`thrifty export`: a trained model as a Hugging Face folder, or its adapter as a folder of PEFT."""

from pathlib import Path

import click

from thrifty.cli.verb_output import print_result
from thrifty.reporting.run_record import find_run


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="The checkpoint of this step instead of the newest.")
@click.option("--raw-weights", is_flag=True, help="The weights in training, where the run judged an average of them.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option(
    "--part",
    type=click.Choice(["adapter", "base", "masks"]),
    help="The adapter alone, in PEFT's layout; the model that it was trained on; a sparse run's masks as a file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    run: Path, folder: Path, step: int | None, raw_weights: bool, dtype: str, part: str | None, as_json: bool
) -> None:
    """Write the model of RUN to FOLDER: config.json, safetensors, and the tokenizer or what images must go through.
    Adapters are merged, gains folded in; with --part the adapter and the base can be had apart.

    FOLDER must not exist or be empty: nothing is overwritten.
    """
    from dataclasses import replace

    import torch

    from thrifty.core.model_spec import ImageModelSpec, PairModelSpec
    from thrifty.core.run_notes import collect_notes
    from thrifty.data.run_metadata import read_model_spec
    from thrifty.modeling.module_surgery import find_blocks
    from thrifty.models import export_model, shape_for
    from thrifty.models.pad_pruned import FILLED_UP
    from thrifty.peft_format import save_adapter
    from thrifty.training.trained_model import Adapters, load_trained_model

    path = find_run(run)
    if part == "masks":
        _export_masks(path, folder, step, as_json)
        return
    adapters: Adapters = "merged" if part is None else "kept" if part == "adapter" else "left out"
    model, recipe = load_trained_model(path, step, raw_weights, adapters=adapters)
    ends = read_model_spec(path, recipe.data.length)
    shape = shape_for(ends, recipe.model)
    if shape is not None:
        shape = replace(shape, depth=len(find_blocks(model)[1]))
    with collect_notes() as notes:
        if part == "adapter":
            save_adapter(model, folder, shape=shape, base=recipe.model.folder or None, dtype=getattr(torch, dtype))
        elif isinstance(ends, ImageModelSpec):
            export_model(model, shape, folder, dtype=getattr(torch, dtype), images=ends)
        else:
            images = ends.images if isinstance(ends, PairModelSpec) else None
            export_model(model, shape, folder, path / "tokenizer.json", getattr(torch, dtype), images)
    said = [text for text in notes if FILLED_UP in text]
    files = sorted(file.name for file in folder.iterdir())
    told = {"run": str(path), "folder": str(folder), "files": files, "notes": said}
    print_result(told, lambda: "\n".join([*said, f"{folder}: {', '.join(files)}"]), as_json)


def _export_masks(run: Path, file: Path, step: int | None, as_json: bool) -> None:
    from thrifty.experiments.mask_export import export_masks

    density, sha256 = export_masks(run, file, step)
    words = f"{file}: density {density:.4g}\n--with 'sparsity.mask_from_file:file=\"{file}\",sha256={sha256}'"
    told = {"run": str(run), "file": str(file), "density": density, "sha256": sha256}
    print_result(told, lambda: words, as_json)
