"""`retrieve`: measure image-caption retrieval and zero-shot classification."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.user_objects import BuildModel
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.data.images.image_data import open_images
from thrifty.data.pairs.caption_rows import caption_rows
from thrifty.data.pairs.pair_data import PairData
from thrifty.data.train_split import DataSplit
from thrifty.interface.loaded_model import own_model
from thrifty.interface.progress import progress
from thrifty.models.contrastive_model import ContrastiveModel
from thrifty.objectives.retrieval_metrics import (
    chance_retrieval,
    class_vectors,
    embed_pairs,
    retrieval,
    zero_shot_accuracy,
)
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.reporting.run_record import run_folder
from thrifty.training.checkpoint_index import CheckpointChoice
from thrifty.training.data_opening import open_examples
from thrifty.training.rank_setup import choose_device
from thrifty.training.trained_model import load_trained_model

BATCH = 256


@dataclass(frozen=True, repr=False)
class RetrievalResult(PrintedResult):
    """Recalls of a contrastive model on held-out pairs, and the recalls at chance level."""

    run: str
    pairs: int
    different_captions: int
    recalls: Mapping[str, float]
    chance: Mapping[str, float]
    classes: str = ""
    zero_shot: Mapping[str, Any] | None = None
    """Zero-shot "accuracy" on images of `classes`, if `classes` was passed."""

    def as_dict(self) -> dict[str, Any]:
        counts = {"run": self.run, "pairs": self.pairs, "different_captions": self.different_captions}
        zero_shot = {} if self.zero_shot is None else {"zero_shot": dict(self.zero_shot)}
        return {**counts, "retrieval": dict(self.recalls), "by_chance": dict(self.chance), **zero_shot}

    def __rich__(self) -> RenderableType:
        printed = [f"{self.pairs:,} held-out pairs with {self.different_captions:,} different captions"]
        printed += [f"{name:14s} {share:7.1%}   chance {self.chance[name]:.1%}" for name, share in self.recalls.items()]
        if zero := self.zero_shot:
            right = f"{zero['accuracy']:.1%} of {zero['images']:,} images classified correctly among"
            printed += [f"{self.classes}: {right} ", f"{zero['labels']} labels; chance {1 / zero['labels']:.1%}"]
        return lines(*printed)


def retrieve(
    run: Any,
    *,
    checkpoint: CheckpointChoice = "last",
    raw_weights: bool = False,
    classes: str = "",
    prompts: Sequence[str] = (),
    model: nn.Module | BuildModel | str | None = None,
) -> RetrievalResult:
    """Measure R@1, R@5 and R@10 of a contrastive run in both directions, on all held-out images and captions.

    Args:
        checkpoint: "best" (best held-out value), "last" or the step of a checkpoint.
        raw_weights: True to use the trained weights instead of their average, if the run evaluated the average.
        classes: Labelled images for zero-shot classification. Each label name is inserted into the `prompts`, such as
            "a picture of {}".
        model: Your own model, if the run trained it.

    Raises UsageError if the objective of the run is not contrastive.

    Example::

        print(thrifty.retrieve("runs/flip-emoji").recalls)
    """
    if prompts and not classes:
        raise UsageError("--prompt requires images to classify", fix="--classes cifar10")
    path = run_folder(run)
    trained, recipe = load_trained_model(path, checkpoint, raw_weights, objects=own_model(run, model))
    if not isinstance(trained, ContrastiveModel):
        raise UsageError(
            f"the run {str(path)!r} has the objective {recipe.objective.name!r}, not contrastive",
            fix="pass a contrastive run, such as a run of the recipe flip-emoji",
        )
    device = choose_device(recipe.device)
    data: PairData = open_examples(recipe, run=path)[1]  # type: ignore[assignment]
    held_out = data.held_out
    vectors = embed_pairs(trained.to(device), held_out.batches(len(held_out), BATCH), device)
    recalls, chance = retrieval(*vectors), chance_retrieval(vectors[2])
    zero_shot = _zero_shot(trained, recipe, data, device, classes, prompts or ("{}",)) if classes else None
    captions = int(vectors[2].max()) + 1
    return RetrievalResult(str(path), len(held_out), captions, recalls, chance, classes, zero_shot)


def _zero_shot(
    model: nn.Module,
    recipe: Recipe,
    data: PairData,
    device: torch.device,
    source: str,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Classify held-out images by the names of their labels. Images are preprocessed as the model's training images."""
    own = data.ends.images
    if wrong := [prompt for prompt in prompts if prompt.count("{}") != 1]:
        raise UsageError(f"the prompt {wrong[0]!r} must have one {{}} for the label", fix='--prompt "a picture of {}"')
    settings = DataSettings(source=source, batch=1, size=own.side, held_out=0.5)
    images = open_images(settings, recipe.seed, own.side, progress())
    if images.ends.channels != own.channels:
        raise UsageError(
            f"the images of {source!r} have {images.ends.channels} channels, but the run has {own.channels}",
            fix="pass images with the same number of channels",
        )
    # the model has seen no image of a user's folder, so all its images are tested
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
