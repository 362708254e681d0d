"""`thrifty export`: a trained model as a Hugging Face folder, or its adapter as a folder of PEFT."""

from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="The checkpoint of this step instead of the newest.")
@click.option("--trained", is_flag=True, help="The weights in training, where the run judged an average of them.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option(
    "--only",
    type=click.Choice(["adapter", "base"]),
    help="The adapter alone, in PEFT's layout, or the model that it was trained on.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    run: Path, folder: Path, step: int | None, trained: bool, dtype: str, only: str | None, as_json: bool
) -> None:
    """Write the model of RUN to FOLDER: config.json, safetensors, tokenizer. Adapters are merged, gains folded in;
    with --only the adapter and the base can be had apart.

    FOLDER must not exist or be empty: nothing is overwritten.
    """
    from dataclasses import replace

    import torch

    from thrifty.cli.telling import print_json, run_path
    from thrifty.core.surgery import find_blocks
    from thrifty.data.tokenizing import read_tokenizer
    from thrifty.models import export_model, model_shape
    from thrifty.peft_files import save_adapter
    from thrifty.restoring import Adapters, restore

    path = run_path(run)
    adapters: Adapters = "merged" if only is None else "kept" if only == "adapter" else "left out"
    model, recipe = restore(path, step, trained, adapters=adapters)
    vocabulary = read_tokenizer(path / "tokenizer.json").vocabulary
    shape = model_shape(recipe.model, vocabulary, recipe.data.length)
    if shape is not None:
        shape = replace(shape, depth=len(find_blocks(model)[1]))
    if only == "adapter":
        save_adapter(model, folder, shape=shape, base=recipe.model.folder or None, dtype=getattr(torch, dtype))
    else:
        export_model(model, shape, folder, path / "tokenizer.json", getattr(torch, dtype))
    if as_json:
        print_json({"run": str(path), "folder": str(folder), "files": sorted(p.name for p in folder.iterdir())})
    else:
        click.echo(f"{folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")
