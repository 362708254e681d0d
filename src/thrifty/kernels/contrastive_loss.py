"""Contrastive loss of pairs (InfoNCE in both directions), computed in tiles, also across the ranks of a process group.
The full matrix of logits is never stored.

Papers: van den Oord et al. 2018 (arXiv 1807.03748); Radford et al. 2021, CLIP (arXiv 2103.00020), figure 3. The logits
of N pairs form a matrix (N, N) of inner products. One softmax runs along each row (over captions), one along each
column (over images). Only one tile of the matrix exists at a time. The log-sum-exps of rows and columns accumulate from
tile to tile. The backward pass recomputes the tiles.

In a group of ranks each rank has n of the N pairs, and computes the n rows of its own images. Each rank receives the
captions of all ranks, N · e elements for vectors of width e. Column log-sum-exps combine the partial results of all
ranks. Gradients of other ranks' captions are sent back to these ranks. If each rank weights its own losses and the
ranks sum their gradients, the result is the gradient of the sum of all weighted losses.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.functional_collectives import all_gather_single, reduce_scatter_single

TILE = 1024
"""Number of rows and columns of a tile (4 MiB in float32)."""


def contrastive_losses(
    images: Tensor, captions: Tensor, group: dist.ProcessGroup | None = None, tile: int = TILE
) -> Tensor:
    """Return one loss per pair (n,), for caption vectors (n, e), and image vectors (n, e) that are already multiplied
    by the logit scale.

    The loss is the mean of two cross-entropies: the caption among all captions, and the image among all images. With a
    `group`, pairs of all ranks are compared. Each rank must have the same number of pairs, and all ranks must call this
    function. Losses are computed in float32 or wider. Second derivatives raise UsageError.
    """
    device = "cpu" if images.is_meta else images.device.type
    with torch.autocast(device, enabled=False):
        dtype = torch.promote_types(images.dtype, torch.float32)
        return _ContrastiveLosses.apply(images.to(dtype), captions.to(dtype), group, tile)


def contrastive_losses_reference(images: Tensor, captions: Tensor) -> Tensor:
    """Return the losses (n,) of `contrastive_losses` on one rank, from the whole matrix (n, n) at once."""
    logits = images @ captions.T
    return (logits.logsumexp(0) + logits.logsumexp(1)) / 2 - logits.diagonal()


@torch.no_grad()
def places_of_own(queries: Tensor, keys: Tensor, query_ids: Tensor, key_ids: Tensor, tile: int = TILE) -> Tensor:
    """Return the position (q,), counted from 0, of each query's best matching key. Keys (k, e) are sorted by their
    inner product with the query (q, e), largest first. A query matches a key if their ids (q,) and (k,) are equal; each
    query must have a match. Among equal products, keys that do not match come first, so identical vectors have no
    advantage.
    """
    places = []
    for rows, own in zip(queries.split(tile), query_ids.split(tile), strict=True):
        products, is_match = rows @ keys.T, own[:, None] == key_ids
        best = products.masked_fill(~is_match, -torch.inf).amax(1, keepdim=True)
        places.append((~(products < best) & ~is_match).sum(1))  # NaN products count as not found
    return torch.cat(places)


class _ContrastiveLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, captions, group, tile):  # type: ignore[override]
        own = slice(0, len(images))
        all_captions = captions
        if group is not None:
            place = dist.get_rank(group)
            own = slice(place * len(images), (place + 1) * len(images))
            all_captions = all_gather_single(captions.contiguous(), 0, group)
        image_sums, caption_sums = _log_sums(images, all_captions, tile)
        if group is not None:
            caption_sums = all_gather_single(caption_sums[None], 0, group).logsumexp(0)
        ctx.own, ctx.group, ctx.tile = own, group, tile
        ctx.save_for_backward(images, all_captions, image_sums, caption_sums)
        return (image_sums + caption_sums[own]) / 2 - (images * captions).sum(1)

    @staticmethod
    def backward(ctx, grad_losses):  # type: ignore[override]
        if torch.is_grad_enabled():
            raise UsageError(
                "the contrastive loss in tiles has no second derivative", fix="use contrastive_losses_reference"
            )
        images, all_captions, *log_sums = ctx.saved_tensors
        weights = grad_losses if ctx.group is None else all_gather_single(grad_losses.contiguous(), 0, ctx.group)
        grad_images, grad_all_captions = _gradients(
            images, all_captions, *log_sums, grad_losses / 2, weights / 2, ctx.tile
        )
        grad_captions = (
            grad_all_captions if ctx.group is None else reduce_scatter_single(grad_all_captions, "sum", 0, ctx.group)
        )
        grad_images = grad_images - grad_losses[:, None] * all_captions[ctx.own]
        return grad_images, grad_captions - grad_losses[:, None] * images, None, None


def _log_sums(images: Tensor, captions: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exps of rows (n,) and columns (N,) of the logits of images (n, e) and captions (N, e)."""
    image_sums, caption_sums = (vectors.new_full((len(vectors),), -torch.inf) for vectors in (images, captions))
    for rows in _tiles(len(images), tile):
        for columns in _tiles(len(captions), tile):
            logits = images[rows] @ captions[columns].T
            image_sums[rows] = torch.logaddexp(image_sums[rows], logits.logsumexp(1))
            caption_sums[columns] = torch.logaddexp(caption_sums[columns], logits.logsumexp(0))
    return image_sums, caption_sums


def _gradients(
    images: Tensor,
    captions: Tensor,
    image_log_sums: Tensor,
    caption_log_sums: Tensor,
    image_weights: Tensor,
    caption_weights: Tensor,
    tile: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of images (n, e) and captions (N, e).

    The log-sum-exp of each row has a weight (n,), and the log-sum-exp of each column a weight (N,).
    """
    grad_images, grad_captions = torch.zeros_like(images), torch.zeros_like(captions)
    for rows in _tiles(len(images), tile):
        for columns in _tiles(len(captions), tile):
            logits = images[rows] @ captions[columns].T
            gradient = (logits - image_log_sums[rows, None]).exp_().mul_(image_weights[rows, None])
            gradient += logits.sub_(caption_log_sums[columns]).exp_().mul_(caption_weights[columns])
            grad_images[rows].addmm_(gradient, captions[columns])
            grad_captions[columns].addmm_(gradient.T, images[rows])
    return grad_images, grad_captions


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]
