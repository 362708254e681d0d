"""ViTCoD (You et al. 2023): fix one sparse attention mask per head from average attention maps.

Paper       You et al. 2023, ViTCoD: Vision Transformer Acceleration via Dedicated Algorithm and Accelerator Co-Design
            (HPCA, arXiv 2210.09573). Read in part, with its published code.
Promise     Each query keeps the largest entries of the head's mean attention map, up to a sum of `cut`. The masks are
            the same for all inputs.
Use         optimizer = thrifty.optim.AdamW(vit, lr=1e-3)
            thrifty.apply((vit, optimizer), "vitcod", total_steps=1000, tokens=17)
Start with  `vitcod:cut=0.5`; the published code has cuts from 0.58 to 0.19. Set `autoencoder=true` to compress queries
            and keys to half as many heads.
Cost        Quality, if relevant positions differ between inputs. Maps of heads · tokens² values per block until the
            masks are fixed, and the masks in every checkpoint.
Avoid       Text, where positions carry no fixed meaning. For speed use attention.block_sparse, whose blocks are whole.
Does not    Adapt the masks after `from_step`. Longer inputs than `tokens` are refused.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.randomness import keyed_generator
from thrifty.core.setting_bounds import Fraction, Natural, Positive, Rate
from thrifty.core.state import TrainState
from thrifty.kernels.attention_filters import vitcod_filter
from thrifty.kernels.attention_filters.keep_masks import (
    attend_kept,
    exact_scores,
    refuse_other_lengths,
    seen_softmax,
    visible_pairs,
)
from thrifty.kernels.sparse_attention.block_grid import NONE, WHOLE, BlockGrid
from thrifty.modeling.attention_sites import ATTENTION_SITES, LOSING_CORES, AttentionCore, AttentionSite
from thrifty.techniques.attention._auxiliary_losses import AuxiliaryLossObjective
from thrifty.techniques.attention._replaced_attention import CHOSEN, SWAPPABLE_CORES, CalibratedAttention, decided_phase

CODE = ("encode_queries", "decode_queries", "encode_keys", "decode_keys")
MASK = ("kept_pairs", "kept_order", "kept_blocks")
POSITIONS = ("position", "position_embeddings", "pos_embed")
"""By what names models of images know their positions, (1, t, d)."""


class AutoencodedCore:
    """A core that is given queries and keys which went through a code. It leaves the code's error (b,)."""

    def __init__(self, place: AttentionSite, inner: AttentionCore):
        self.place, self.inner = place, inner
        self.losses: list[Tensor] | None = None  # while somebody collects them

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        coded = autoencode_attention(self.place, q, k)
        # a forward pass that is run again must save the same tensors, whether anybody collects the loss or not
        if torch.is_grad_enabled():
            loss = vitcod_filter.autoencoder_loss(q, coded[0]) + vitcod_filter.autoencoder_loss(k, coded[1])
            if self.losses is not None:
                self.losses.append(loss)
        return self.inner(*coded, v, *mask)


def autoencode_attention(place: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (b, h, t, k) and keys (b, g, t, k) as they come back from the codes of a place."""
    of_queries, of_keys = (
        [getattr(place.module, name).to(x.dtype) for name in names] for x, names in ((q, CODE[:2]), (k, CODE[2:]))
    )
    return vitcod_filter.autoencode_heads(q, *of_queries), vitcod_filter.autoencode_heads(k, *of_keys)


def fixed_attention(
    place: AttentionSite, block: int, count: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of q (b, h, t, k) over what the masks of a place leave of k and v (b, g, t, k), in `count` blocks of
    each head, or under a mask where that is 0."""
    t, kept = q.shape[2], place.module.kept_pairs
    refuse_other_lengths(t, k.shape[2])
    if t > kept.shape[-1] > 1:
        raise UsageError(
            f"{place.name} has masks for {kept.shape[-1]} tokens and was given {t}",
            fix=f"--set techniques.{Vitcod.name}.tokens={t}, from the start of the run",
        )
    keep = visible_pairs(t, t, place.causal, mask, q.device) & kept[:, :t, :t]
    if count and t == kept.shape[-1]:
        codes = torch.where(place.module.kept_blocks, WHOLE, NONE).to(torch.int8)[None]
        return vitcod_filter.split_attention(q, k, v, keep, place.module.kept_order, BlockGrid(codes, block, count))
    return attend_kept(q, k, v, keep)


class Vitcod(CalibratedAttention):
    """Maps are averaged over examples of the last steps with plain attention. The class token attends to every token
    and receives attention from every token; each token keeps itself (ours). A shorter input takes the first rows and
    columns of the masks. In the published code a cut of 0.19 removes 90 to 95 % of the pairs of DeiT.

    `products = blocks` computes attention in blocks, with the most attended tokens first (the paper's split into a
    denser and a sparser part). Values and gradients are equal. With `autoencoder`, queries and keys pass through a
    learned encoder and decoder of half as many heads. The reconstruction error is added to the loss. They are trained
    from the first step and dropped at the end.

    Differs from the paper: it averages maps over all training images and then fine-tunes for 100 epochs. Here `steps`
    times `examples` of each rank are averaged and training continues. The autoencoder starts as the projection on a
    random half of the heads; the paper trains it for 100 epochs before it draws masks.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        **CalibratedAttention.clashes,
        Claim.HEADS_AND_NEURONS: "there is a mask for each head, and it takes heads out",
        Claim.TENSOR_PARALLELISM: "there is a mask for each head, and heads would be on several ranks",
        Claim.ENCODER_INPUT: "masks are of places, and it leaves out others of each input",
        Claim.RESOLUTION: "masks are of places, and it moves them",
    }

    cut: Fraction = 0.5
    """Of a query's average weights, what the keys that it keeps come to."""
    first: Natural = 1
    """Tokens at the beginning, such as a class token, that see all and that all see."""
    tokens: Natural = 0
    """Of an input, at most; 0 asks a model of images for its positions."""
    autoencoder: bool = False
    """Whether queries and keys go through a code of half as many heads."""
    weight: Rate = 1e-4
    """Of the code's error in the loss."""
    products: Literal["dense", "blocks"] = "dense"
    """How attention over kept pairs is computed: under a mask, or in blocks of them."""
    block: Positive = 16
    """Tokens of a block's side."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autoencoder:
            refused = {
                Claim.FROZEN_BASE_WEIGHTS: "its codes would be frozen",
                Claim.SHARED_PARAMETERS: "each block has a code of its own",
                Claim.COMPILED_BLOCKS: "codes hand their error on beside the block's result",
            }
            object.__setattr__(self, "claims", self.claims | {Claim.AUXILIARY_LOSSES})
            object.__setattr__(self, "clashes", {**self.clashes, **refused})

    @property
    def optional_seams(self) -> frozenset[str]:
        return super().optional_seams | (frozenset() if self.autoencoder else {"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        model = super().model(model)
        if self.autoencoder:
            LOSING_CORES.set(model, [])
            for place in ATTENTION_SITES.of(model):
                self.attach(place)
                self.put_code(model, place)
        return model

    def put_code(self, model: nn.Module, place: AttentionSite) -> None:
        """Around the core that is there, whether it is watched or masked."""
        decided, watched = decided_phase(model), SWAPPABLE_CORES.of(model).get(place.name)
        coded = AutoencodedCore(place, place.plain if watched else self.core(place, decided.get("found", {})))
        LOSING_CORES.of(model).append(coded)
        if watched:
            watched.core = coded
        else:
            place.put(coded)

    def attach(self, place: AttentionSite) -> None:
        """Give an attention its codes: projections on a random half of the heads, to begin with."""
        like = next(place.module.parameters())
        for heads, names in ((place.heads, CODE[:2]), (place.key_heads, CODE[2:])):
            draw = keyed_generator(f"{place.name}.{names[0]}", like)
            drawn = torch.empty(heads, vitcod_filter.encode_heads(heads), device=like.device).normal_(generator=draw)
            basis = torch.linalg.qr(drawn)[0]
            for name, weight in zip(names, (basis.mT, basis), strict=True):
                place.module.register_parameter(name, nn.Parameter(weight.clone(memory_format=torch.contiguous_format)))

    def count(self, model: nn.Module, place: AttentionSite) -> int:
        return place.heads * (self.tokens or positions_of(model, self.name)) ** 2

    def measure(self, place: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        side, t = side_of(place, len(place.module.calibration) - 1), q.shape[2]
        refuse_other_lengths(t, k.shape[2])
        if t > side:
            raise UsageError(
                f"{self.name}: {place.name} was given {t} tokens, and tokens is {side}",
                fix=f"--set techniques.{self.name}.tokens={t}",
            )
        q, k = autoencode_attention(place, q, k) if self.autoencoder else (q, k)
        visible = visible_pairs(t, t, place.causal, mask, q.device)
        average = vitcod_filter.average_map(seen_softmax(exact_scores(q, k), visible), visible)
        return nn.functional.pad(average, (0, side - t, 0, side - t))

    def settle(self, place: AttentionSite, means: Tensor) -> dict[str, Any]:
        side = side_of(place, len(means))
        masks = vitcod_filter.fixed_masks(means.view(-1, side, side), self.cut, self.first)
        if place.causal:
            masks = masks.tril()
        return {"tokens": side, "masks": vitcod_filter.written_masks(masks)}

    def core(self, place: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        masks = masks_of(place, calibration)
        limit = round(vitcod_filter.GLOBAL / 197 * masks.shape[-1])
        order, blocks = vitcod_filter.split_blocks(masks, limit, self.block)
        for name, array in zip(MASK, (masks, order, blocks), strict=True):
            tensor = torch.tensor(array, device=next(place.module.parameters()).device)
            place.module.register_buffer(name, tensor, persistent=False)
        count = int(blocks.sum((1, 2)).max()) if self.products == "blocks" else 0
        return partial(fixed_attention, place, self.block, count)

    def objective(self, objective: Objective) -> Objective:
        return AuxiliaryLossObjective(objective, self.weight) if self.autoencoder else objective

    def finish(self, model: nn.Module) -> nn.Module:
        if self.autoencoder:
            self.refuse_export()
        places = ATTENTION_SITES.of(model)
        model = super().finish(model)
        for place in places:
            for name in (*CODE, *MASK):
                if hasattr(place.module, name):
                    delattr(place.module, name)
        if self.autoencoder:
            LOSING_CORES.remove(model)
        return model

    def holds(self, state: TrainState) -> None:
        super().holds(state)
        decided = decided_phase(state.model)
        for place in ATTENTION_SITES.of(state.model) if state.model and decided["phase"] == CHOSEN else ():
            if not np.array_equal(place.module.kept_pairs.cpu().numpy(), masks_of(place, decided.get("found", {}))):
                raise IntegrityError(f"{self.name}: the mask of {place.name} is not the one in the log")


def masks_of(place: AttentionSite, calibration: Mapping[str, Any]) -> np.ndarray:
    """The masks (h, t, t) that were found for a place; one pair that stands for all where only work is counted."""
    if place.name not in calibration:
        return np.ones((1, 1, 1), bool)
    return vitcod_filter.read_masks(calibration[place.name]["masks"], place.heads, calibration[place.name]["tokens"])


def side_of(place: AttentionSite, count: int) -> int:
    """Tokens of maps of so many numbers."""
    return math.isqrt(count // place.heads)


def positions_of(model: nn.Module, name: str) -> int:
    """Tokens of an image, by what a model has as positions."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if path.rpartition(".")[2] in POSITIONS and tensor.ndim == 3:
            return tensor.shape[1]
    raise RefusedError(
        f"{name}: {type(model).__name__} does not say how many tokens its inputs have at most",
        fix=f"--set techniques.{name}.tokens=NUMBER, for masks of as many",
    )
