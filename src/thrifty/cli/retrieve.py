"""`thrifty retrieve`: how well a model finds captions by images and images by captions, and classes by their names."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from thrifty.cli.verb_output import print_json, progress
from thrifty.core.errors import UsageError
from thrifty.reporting.run_record import find_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from thrifty.core.recipe import Recipe
    from thrifty.data.pairs.pair_data import PairData

BATCH = 256


@click.command("retrieve")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", type=int, default=None, help="The checkpoint of this step instead of the newest.")
@click.option("--raw-weights", is_flag=True, help="The weights in training where the run judged an average of them.")
@click.option("--classes", default="", metavar="SOURCE", help="Also tell apart the labels of these images by name.")
@click.option(
    "--prompt", "prompts", multiple=True, metavar="TEXT",
    help='What a class is called, {} standing for its label; several are averaged.  [default: "{}"]',
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    run: Path, step: int | None, raw_weights: bool, classes: str, prompts: tuple[str, ...], as_json: bool
) -> None:
    """Measure the model of RUN on all held-out images and captions of its data: R@1, R@5 and R@10 both ways.

    RUN is a run folder, or the name of one under ./runs, whose objective was contrastive.
    """
    from thrifty.models.contrastive_model import ContrastiveModel
    from thrifty.objectives.retrieval_metrics import chance_retrieval, embed_pairs, retrieval
    from thrifty.training.run_setup import choose_device, open_examples
    from thrifty.training.trained_model import load_trained_model

    if prompts and not classes:
        raise UsageError("--prompt is given and no images to tell apart", fix="--classes SOURCE, such as cifar10")
    path = find_run(run)
    model, recipe = load_trained_model(path, step, raw_weights)
    if not isinstance(model, ContrastiveModel):
        raise UsageError(
            f"the model of {run} learned {recipe.objective.name} and does not compare images with captions",
            fix="name a run whose objective was contrastive, such as one of the recipe flip-emoji",
        )
    device = choose_device(recipe.device)
    data: PairData = open_examples(recipe)[1]  # type: ignore[assignment]
    held_out = data.held_out
    vectors = embed_pairs(model.to(device), held_out.batches(len(held_out), BATCH), device)
    recalls, chance = retrieval(*vectors), chance_retrieval(vectors[2])
    told = {"run": str(path), "pairs": len(held_out), "different_captions": int(vectors[2].max()) + 1}
    told |= {"retrieval": recalls, "by_chance": chance}
    if classes:
        told["zero_shot"] = _zero_shot(model, recipe, data, device, classes, prompts or ("{}",))
    if as_json:
        print_json(told)
        return
    click.echo(f"{told['pairs']:,} held-out pairs with {told['different_captions']:,} different captions")
    for name, share in recalls.items():
        click.echo(f"{name:14s} {share:7.1%}   by chance {chance[name]:.1%}")
    if classes:
        zero = told["zero_shot"]
        click.echo(f"{classes}: {zero['accuracy']:.1%} of {zero['images']:,} images told right by the names of their ")
        click.echo(f"{zero['labels']} labels; by chance {1 / zero['labels']:.1%}")


def _zero_shot(
    model: "nn.Module",
    recipe: "Recipe",
    data: "PairData",
    device: "torch.device",
    source: str,
    prompts: tuple[str, ...],
) -> dict:
    """Held-out images with labels, shown as the model's own images are, told apart by what their labels are called."""
    from dataclasses import replace

    import torch

    from thrifty.core.batches import Batch
    from thrifty.core.recipe import DataSettings
    from thrifty.data.epoch_sampler import HeldOutExamples
    from thrifty.data.images.image_data import open_images
    from thrifty.data.pairs.caption_rows import caption_rows
    from thrifty.data.train_split import DataSplit
    from thrifty.objectives.retrieval_metrics import class_vectors, zero_shot_accuracy

    own = data.ends.images
    if wrong := [prompt for prompt in prompts if prompt.count("{}") != 1]:
        raise UsageError(f"the prompt {wrong[0]!r} has no one place for a label", fix='--prompt "a picture of {}"')
    settings = DataSettings(source=source, batch=1, size=own.side, held_out=0.5)
    images = open_images(settings, recipe.seed, own.side, progress())
    if images.ends.channels != own.channels:
        raise UsageError(
            f"the images of {source} have {images.ends.channels} channels and those of the run {own.channels}",
            fix="name images with as many",
        )
    # of a folder all images are as new to the model as those that a known set keeps to test on
    parts = [*images.parts.values()] if Path(source).expanduser().is_dir() else [images.parts[DataSplit.HELD_OUT]]
    shown = [
        HeldOutExamples(replace(arrays, ends=replace(arrays.ends, mean=own.mean, std=own.std))) for arrays in parts
    ]
    rows = []
    for prompt in prompts:
        texts = [prompt.replace("{}", label.replace("_", " ")) for label in images.ends.labels]
        fields = caption_rows(texts, data.tokenizer, data.ends.text.length)
        rows.append(Batch(fields, torch.ones(len(texts))))
    vectors = class_vectors(model, rows, device)
    count = sum(map(len, shown))
    batches = (batch for part in shown for batch in part.batches(len(part), BATCH))
    accuracy = zero_shot_accuracy(model, vectors, batches, device)
    return {"accuracy": accuracy, "images": count, "labels": len(images.ends.labels), "prompts": list(prompts)}
