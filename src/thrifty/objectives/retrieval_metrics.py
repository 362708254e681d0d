"""What a model of images and captions is worth beyond one batch: how it finds one by the other, and tells classes apart
by their names (Radford et al. 2021, CLIP, sections 3.1 and appendix E.1)."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.kernels.contrastive_loss import places_of_own

FIRST = (1, 5, 10)
"""Among how many of the nearest the right one is looked for."""


@torch.no_grad()
def embed_pairs(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Unit vectors of images and of captions (n, e), and a number for each caption (n,) that equal ones share. The
    model is one of ours with two towers, see `models/contrastive_model.py`."""
    model.eval()
    images, captions, texts = [], [], []
    for batch in batches:
        keep = batch.fields.get("keep")
        images.append(model.of_images(batch["inputs"].to(device)).float().cpu())
        captions.append(
            model.of_captions(batch["tokens"].to(device), None if keep is None else keep.to(device)).float().cpu()
        )
        texts.append(batch["tokens"] if keep is None else batch["tokens"].masked_fill(~keep, -1))
    numbers = torch.cat(texts).unique(dim=0, return_inverse=True)[1]
    return torch.cat(images), torch.cat(captions), numbers


def retrieval(images: Tensor, captions: Tensor, numbers: Tensor) -> dict[str, float]:
    """Of unit vectors (n, e) and the number of each pair's caption (n,): the share of images that find their caption
    among the first 1, 5 and 10 of all ("captions R@1" …), and of captions that find an image of theirs ("images R@1"
    …). Where several images have one caption, any of them is right. Of equally near ones the wrong come first."""
    recalls = {}
    for name, (queries, keys) in (("captions", (images, captions)), ("images", (captions, images))):
        places = places_of_own(queries, keys, numbers, numbers)
        recalls |= {f"{name} R@{first}": float((places < first).double().mean()) for first in FIRST}
    return recalls


def chance_retrieval(numbers: Tensor) -> dict[str, float]:
    """What who knows nothing comes to, of captions with these numbers (n,)."""
    total = len(numbers)
    own = numbers.bincount()[numbers].double()  # of each pair, how many are right
    recalls = {}
    for first in FIRST:
        # none of the first is right: drawn without replacement among the others
        missed = torch.ones(total, dtype=torch.float64)
        for drawn in range(min(first, total)):
            missed *= ((total - own - drawn) / (total - drawn)).clamp(min=0)
        recalls |= {f"{name} R@{first}": float((1 - missed).mean()) for name in ("captions", "images")}
    return recalls


@torch.no_grad()
def class_vectors(model: nn.Module, prompts: Sequence[Batch], device: torch.device) -> Tensor:
    """A unit vector for each of v classes (v, e): the mean of those of its prompts, each batch of which has one for
    every class."""
    model.eval()
    parts = [model.of_captions(batch["tokens"].to(device), batch["keep"].to(device)).float() for batch in prompts]
    return F.normalize(torch.stack(parts).mean(0), dim=-1).cpu()


@torch.no_grad()
def zero_shot_accuracy(model: nn.Module, classes: Tensor, batches: Iterable[Batch], device: torch.device) -> float:
    """The share of images whose own class's vector (of v, e) is the nearest; batches have "inputs" and "labels"."""
    right, total = 0, 0
    for batch in batches:
        nearest = (model.of_images(batch["inputs"].to(device)).float().cpu() @ classes.T).argmax(1)
        right, total = right + int((nearest == batch["labels"]).sum()), total + len(batch)
    return right / total
