"""The contrastive loss of pairs (InfoNCE in both directions), without the matrix of all products, and over ranks.

Papers: van den Oord et al. 2018 (arXiv 1807.03748); Radford et al. 2021, CLIP (arXiv 2103.00020), figure 3. The logits
of N pairs are the products of their vectors, a matrix (N, N) whose rows are softmaxed over captions and whose columns
over images. Only tiles of it are made, the log-sum-exps of rows and columns growing from tile to tile; the backward
pass makes the tiles again.

Over a group of ranks each has n of the N pairs, and makes the n rows of its own images: for these it is sent the
captions of all, N · e numbers. Log-sum-exps of columns are put together from what ranks found for their rows, and what
a rank's rows mean for other ranks' captions is sent back to those. Gradients are those of the sum of all ranks' losses,
as long as each rank weighs its own and gradients are summed.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.functional_collectives import all_gather_single, reduce_scatter_single

TILE = 1024
"""Rows and columns of a tile: 4 MiB."""


def contrastive_losses(
    images: Tensor, captions: Tensor, group: dist.ProcessGroup | None = None, tile: int = TILE
) -> Tensor:
    """One loss per pair (n,) for vectors of images (n, e), the scale included, and of captions (n, e): half of what the
    caption costs among all captions, half of what the image costs among all images.

    With a `group` the pairs of its ranks, as many on each, are compared with each other, and all must come here.
    Computed in float32, or in what is wider. Asking for second derivatives is a `UsageError`.
    """
    device = "cpu" if images.is_meta else images.device.type
    with torch.autocast(device, enabled=False):
        dtype = torch.promote_types(images.dtype, torch.float32)
        return _ContrastiveLosses.apply(images.to(dtype), captions.to(dtype), group, tile)


def contrastive_losses_reference(images: Tensor, captions: Tensor) -> Tensor:
    """The same by the book: the whole matrix at once, on one rank."""
    logits = images @ captions.T
    return (logits.logsumexp(0) + logits.logsumexp(1)) / 2 - logits.diagonal()


@torch.no_grad()
def places_of_own(queries: Tensor, keys: Tensor, of_queries: Tensor, of_keys: Tensor, tile: int = TILE) -> Tensor:
    """At which place (q,) each query (q, e) finds a key (k, e) that belongs to it, 0 for the first, when keys are
    sorted by their products with it. A query and a key belong together where their numbers (q,) and (k,) are equal;
    each query must have such a key. Of equal products those of other keys come first, so that nothing is gained by
    having all alike."""
    places = []
    for rows, own in zip(queries.split(tile), of_queries.split(tile), strict=True):
        products, right = rows @ keys.T, own[:, None] == of_keys
        best = products.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        places.append((~(products < best) & ~right).sum(1))  # what is no number is no find
    return torch.cat(places)


class _ContrastiveLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, captions, group, tile):  # type: ignore[override]
        own = slice(0, len(images))
        everyone = captions
        if group is not None:
            place = dist.get_rank(group)
            own = slice(place * len(images), (place + 1) * len(images))
            everyone = all_gather_single(captions.contiguous(), 0, group)
        of_images, of_captions = _log_sums(images, everyone, tile)
        if group is not None:
            of_captions = all_gather_single(of_captions[None], 0, group).logsumexp(0)
        ctx.own, ctx.group, ctx.tile = own, group, tile
        ctx.save_for_backward(images, everyone, of_images, of_captions)
        return (of_images + of_captions[own]) / 2 - (images * captions).sum(1)

    @staticmethod
    def backward(ctx, of_losses):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UsageError(
                "the contrastive loss in tiles has no second derivative", fix="use contrastive_losses_reference for it"
            )
        images, everyone, *log_sums = ctx.saved_tensors
        shares = of_losses if ctx.group is None else all_gather_single(of_losses.contiguous(), 0, ctx.group)
        of_images, of_everyone = _gradients(images, everyone, *log_sums, of_losses / 2, shares / 2, ctx.tile)
        of_captions = of_everyone if ctx.group is None else reduce_scatter_single(of_everyone, "sum", 0, ctx.group)
        of_images = of_images - of_losses[:, None] * everyone[ctx.own]
        return of_images, of_captions - of_losses[:, None] * images, None, None


def _log_sums(images: Tensor, captions: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exps of the rows (n,) and the columns (N,) of images (n, e) times captions (N, e)."""
    of_images, of_captions = (vectors.new_full((len(vectors),), -torch.inf) for vectors in (images, captions))
    for rows in _tiles(len(images), tile):
        for columns in _tiles(len(captions), tile):
            logits = images[rows] @ captions[columns].T
            of_images[rows] = torch.logaddexp(of_images[rows], logits.logsumexp(1))
            of_captions[columns] = torch.logaddexp(of_captions[columns], logits.logsumexp(0))
    return of_images, of_captions


def _gradients(
    images: Tensor,
    captions: Tensor,
    log_sums_of_images: Tensor,
    log_sums_of_captions: Tensor,
    shares_of_images: Tensor,
    shares_of_captions: Tensor,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Of images (n, e) and captions (N, e), when the log-sum-exp of each row counts with its share (n,) and that of
    each column with its own (N,)."""
    of_images, of_captions = torch.zeros_like(images), torch.zeros_like(captions)
    for rows in _tiles(len(images), tile):
        for columns in _tiles(len(captions), tile):
            logits = images[rows] @ captions[columns].T
            gradient = (logits - log_sums_of_images[rows, None]).exp_().mul_(shares_of_images[rows, None])
            gradient += logits.sub_(log_sums_of_captions[columns]).exp_().mul_(shares_of_captions[columns])
            of_images[rows].addmm_(gradient, captions[columns])
            of_captions[columns].addmm_(gradient.T, images[rows])
    return of_images, of_captions


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]
