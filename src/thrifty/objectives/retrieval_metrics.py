"""Metrics of image-text models: retrieval and zero-shot classification over a whole set.

Paper     Radford et al. 2021, CLIP (arXiv 2103.00020), section 3.1 and appendix E.1.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.kernels.contrastive_loss import places_of_own

FIRST = (1, 5, 10)
"""Values of k in recall at k."""


@torch.no_grad()
def embed_pairs(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized embeddings of images and of captions, and the number of each caption's text.

    Embeddings are (n, e), numbers (n,). Equal captions have the same number. The model has an image and a text encoder,
    see `models/contrastive_model.py`.
    """
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
    """Return the recall at 1, 5 and 10 of retrieval between images and captions.

    Embeddings are normalized, (n, e). Captions with equal `numbers` (n,) have the same text. "captions R@k" is the
    fraction of images whose caption is among the k nearest captions. "images R@k" is the fraction of captions whose
    image is among the k nearest images. If images share a caption, each of these images counts as right. A right
    candidate is ranked after wrong candidates of equal similarity.
    """
    recalls = {}
    for name, (queries, keys) in (("captions", (images, captions)), ("images", (captions, images))):
        places = places_of_own(queries, keys, numbers, numbers)
        recalls |= {f"{name} R@{first}": float((places < first).double().mean()) for first in FIRST}
    return recalls


def chance_retrieval(numbers: Tensor) -> dict[str, float]:
    """Return the expected recalls of a random ranking. Captions with equal `numbers` (n,) have the same text."""
    total = len(numbers)
    own = numbers.bincount()[numbers].double()  # number of right candidates of each pair
    recalls = {}
    for first in FIRST:
        # probability that none of the `first` candidates is right, if sampled without replacement
        missed = torch.ones(total, dtype=torch.float64)
        for drawn in range(min(first, total)):
            missed *= ((total - own - drawn) / (total - drawn)).clamp(min=0)
        recalls |= {f"{name} R@{first}": float((1 - missed).mean()) for name in ("captions", "images")}
    return recalls


@torch.no_grad()
def class_vectors(model: nn.Module, prompts: Sequence[Batch], device: torch.device) -> Tensor:
    """Return normalized class embeddings (v, e): the mean over the prompts of each class.

    Each batch of `prompts` has one prompt for each of the v classes.
    """
    model.eval()
    parts = [model.of_captions(batch["tokens"].to(device), batch["keep"].to(device)).float() for batch in prompts]
    return F.normalize(torch.stack(parts).mean(0), dim=-1).cpu()


@torch.no_grad()
def zero_shot_accuracy(model: nn.Module, classes: Tensor, batches: Iterable[Batch], device: torch.device) -> float:
    """Return the fraction of images whose nearest class embedding is the embedding of their label.

    `classes` are class embeddings (v, e). Batches have "inputs" and "labels".
    """
    correct, total = 0, 0
    for batch in batches:
        nearest = (model.of_images(batch["inputs"].to(device)).float().cpu() @ classes.T).argmax(1)
        correct, total = correct + int((nearest == batch["labels"]).sum()), total + len(batch)
    return correct / total
