"""ViTCoD (You et al. 2023): fix one sparse attention mask per head from average attention maps.

Paper       You et al. 2023, ViTCoD: Vision Transformer Acceleration via Dedicated Algorithm and Accelerator Co-Design
            (HPCA, arXiv 2210.09573). Parts of the paper and its published code were read.
Promise     Each query keeps the keys with the largest average attention weights, until the kept weights sum to `cut`.
            The masks are the same for all inputs.
Use         optimizer = thrifty.optim.AdamW(vit, lr=1e-3)
            thrifty.apply((vit, optimizer), "vitcod", total_steps=1000, tokens=17)
Start with  `vitcod:cut=0.5`; the published code has cuts from 0.58 to 0.19. Set `autoencoder=true` to compress queries
            and keys to half the number of heads.
Cost        Quality drops if relevant positions differ between inputs. Each block stores heads · tokens² values until
            the masks are fixed; checkpoints store the masks.
Avoid       Text, because its positions carry no fixed meaning. For speed use attention.block_sparse, which computes
            whole blocks.
Does not    Adapt the masks after `from_step`, or accept inputs longer than `tokens`.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError, class_name
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
from thrifty.modeling.attention_cores import ATTENTION_SITES, LOSING_CORES, AttentionCore, AttentionSite
from thrifty.techniques.attention._auxiliary_losses import AuxiliaryLossObjective
from thrifty.techniques.attention._replaced_attention import CHOSEN, SWAPPABLE_CORES, CalibratedAttention, decided_phase

AUTOENCODER = ("encode_queries", "decode_queries", "encode_keys", "decode_keys")
MASK_BUFFERS = ("kept_pairs", "kept_order", "kept_blocks")
POSITIONS = ("position", "position_embeddings", "pos_embed")
"""Names of position tables (1, t, d) in image models."""


class AutoencodedCore:
    """An attention core that passes queries and keys through autoencoders, and appends the reconstruction error (b,) to
    `losses`."""

    def __init__(self, site: AttentionSite, inner: AttentionCore):
        self.site, self.inner = site, inner
        self.losses: list[Tensor] | None = None  # a list during collection

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, **options: Any) -> Tensor:
        decoded = autoencode_attention(self.site, q, k)
        # a recomputed forward pass must save the same tensors, with or without collection
        if torch.is_grad_enabled():
            loss = vitcod_filter.autoencoder_loss(q, decoded[0]) + vitcod_filter.autoencoder_loss(k, decoded[1])
            if self.losses is not None:
                self.losses.append(loss)
        return self.inner(*decoded, v, *mask, **options)


def autoencode_attention(site: AttentionSite, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Pass queries (b, h, t, k) and keys (b, g, t, k) through the autoencoders of an attention. Shapes stay."""
    query_weights, key_weights = (
        [getattr(site.module, name).to(x.dtype) for name in names]
        for x, names in ((q, AUTOENCODER[:2]), (k, AUTOENCODER[2:]))
    )
    return vitcod_filter.autoencode_heads(q, *query_weights), vitcod_filter.autoencode_heads(k, *key_weights)


def fixed_attention(
    site: AttentionSite,
    block: int,
    count: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return attention with the fixed masks of the attention module `site`.

    q and the result are (b, h, t, k), k and v are (b, g, t, k). `count` is the number of computed blocks per head; 0
    computes all pairs with a dense mask.
    """
    t, kept = q.shape[2], site.module.kept_pairs
    refuse_other_lengths(t, k.shape[2])
    if t > kept.shape[-1] > 1:
        raise UsageError(
            f"'{t}' tokens exceed the {kept.shape[-1]} tokens of the masks of {site.name}",
            fix=f"start a new run with --set techniques.{Vitcod.name}.tokens={t}",
        )
    keep = visible_pairs(t, t, site.causal, mask, q.device) & kept[:, :t, :t]
    if count and bias is None and t == kept.shape[-1]:
        codes = torch.where(site.module.kept_blocks, WHOLE, NONE).to(torch.int8)[None]
        return vitcod_filter.split_attention(
            q, k, v, keep, site.module.kept_order, BlockGrid(codes, block, count), dropout
        )
    return attend_kept(q, k, v, keep, dropout, bias)


class Vitcod(CalibratedAttention):
    """Masks are computed from attention maps, which are averaged over examples of the last steps before `from_step`.
    The class token attends to every token and every token attends to it. Each token attends to itself (not in the
    paper). A shorter input uses the first rows and columns of the masks. In the published code a cut of 0.19 removes 90
    to 95 % of the query-key pairs of DeiT.

    `products=blocks` computes attention in blocks, with the most attended tokens first (the paper's split into a denser
    and a sparser part). `products=blocks` and `products=dense` have equal outputs and gradients. With `autoencoder`,
    queries and keys pass through a learned encoder and decoder with half the number of heads. The reconstruction error
    is added to the loss. The autoencoders train from the first step and are dropped at the end.

    Differs from the paper: each rank averages maps over `steps` times `examples` examples, and training continues. The
    paper averages over all training images and then fine-tunes for 100 epochs. Here the autoencoder starts as a random
    orthogonal projection to half the number of heads. The paper trains the autoencoder for 100 epochs before it
    computes masks.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        **CalibratedAttention.clashes,
        Claim.HEADS_AND_NEURONS: "each head has a mask, and it removes heads",
        Claim.TENSOR_PARALLELISM: "each head has a mask, and heads would be on several ranks",
        Claim.ENCODER_INPUT: "masks belong to positions, and it drops different positions of each input",
        Claim.RESOLUTION: "masks belong to positions, and it changes the positions",
    }

    cut: Fraction = 0.5
    """Sum of average attention weights that the kept keys of a query must reach."""
    first: Natural = 1
    """Number of first tokens, such as a class token, that attend to all tokens and are visible to all."""
    tokens: Natural = 0
    """Maximum number of tokens of an input; 0 reads the number from the position table of an image model."""
    autoencoder: bool = False
    """Pass queries and keys through an autoencoder with half the number of heads."""
    weight: Rate = 1e-4
    """Weight of the reconstruction error in the loss."""
    products: Literal["dense", "blocks"] = "dense"
    """Computation of attention: all pairs with a mask ("dense"), or blocks that contain kept pairs ("blocks")."""
    block: Positive = 16
    """Side of a block in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.autoencoder:
            refused = {
                Claim.FROZEN_BASE_WEIGHTS: "its autoencoders would be frozen",
                Claim.SHARED_PARAMETERS: "each block has an autoencoder of its own",
                Claim.COMPILED_BLOCKS: "autoencoders return their error in addition to the block's output",
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
            for site in ATTENTION_SITES.of(model):
                self.attach(site)
                self.put_autoencoder(model, site)
        return model

    def put_autoencoder(self, model: nn.Module, site: AttentionSite) -> None:
        """Wrap the current core of an attention module in an autoencoder, whether or not its masks are already
        fixed."""
        decided, swappable = decided_phase(model), SWAPPABLE_CORES.of(model).get(site.name)
        core = AutoencodedCore(site, site.plain if swappable else self.core(site, decided.get("found", {})))
        LOSING_CORES.of(model).append(core)
        if swappable:
            swappable.core = core
        else:
            site.put(core)

    def attach(self, site: AttentionSite) -> None:
        """Add autoencoders to an attention module, initialized as random orthogonal projections to half the number of
        heads.
        """
        like = next(site.module.parameters())
        for heads, names in ((site.heads, AUTOENCODER[:2]), (site.key_heads, AUTOENCODER[2:])):
            generator = keyed_generator(f"{site.name}.{names[0]}", like)
            values = torch.empty(heads, vitcod_filter.encode_heads(heads), device=like.device).normal_(
                generator=generator
            )
            basis = torch.linalg.qr(values)[0]
            for name, weight in zip(names, (basis.mT, basis), strict=True):
                site.module.register_parameter(name, nn.Parameter(weight.clone(memory_format=torch.contiguous_format)))

    def count(self, model: nn.Module, site: AttentionSite) -> int:
        return site.heads * (self.tokens or positions_of(model, self.name)) ** 2

    def measure(self, site: AttentionSite, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        side, t = side_of(site, len(site.module.calibration) - 1), q.shape[2]
        refuse_other_lengths(t, k.shape[2])
        if t > side:
            raise UsageError(
                f"{self.name}: '{t}' tokens of {site.name} exceed tokens = {side}",
                fix=f"--set techniques.{self.name}.tokens={t}",
            )
        q, k = autoencode_attention(site, q, k) if self.autoencoder else (q, k)
        visible = visible_pairs(t, t, site.causal, mask, q.device)
        average = vitcod_filter.average_map(seen_softmax(exact_scores(q, k, bias), visible), visible)
        return nn.functional.pad(average, (0, side - t, 0, side - t))

    def settle(self, site: AttentionSite, means: Tensor) -> dict[str, Any]:
        side = side_of(site, len(means))
        masks = vitcod_filter.fixed_masks(means.view(-1, side, side), self.cut, self.first)
        if site.causal:
            masks = masks.tril()
        return {"tokens": side, "masks": vitcod_filter.written_masks(masks)}

    def core(self, site: AttentionSite, calibration: Mapping[str, Any]) -> AttentionCore:
        masks = masks_of(site, calibration)
        limit = round(vitcod_filter.GLOBAL / 197 * masks.shape[-1])
        order, blocks = vitcod_filter.split_blocks(masks, limit, self.block)
        for name, array in zip(MASK_BUFFERS, (masks, order, blocks), strict=True):
            tensor = torch.tensor(array, device=next(site.module.parameters()).device)
            site.module.register_buffer(name, tensor, persistent=False)
        count = int(blocks.sum((1, 2)).max()) if self.products == "blocks" else 0
        return partial(fixed_attention, site, self.block, count)

    def objective(self, objective: Objective) -> Objective:
        return AuxiliaryLossObjective(objective, self.weight) if self.autoencoder else objective

    def finish(self, model: nn.Module) -> nn.Module:
        if self.autoencoder:
            self.refuse_export()
        sites = ATTENTION_SITES.of(model)
        model = super().finish(model)
        for site in sites:
            for name in (*AUTOENCODER, *MASK_BUFFERS):
                if hasattr(site.module, name):
                    delattr(site.module, name)
        if self.autoencoder:
            LOSING_CORES.remove(model)
        return model

    def holds(self, state: TrainState) -> None:
        super().holds(state)
        decided = decided_phase(state.model)
        for site in ATTENTION_SITES.of(state.model) if state.model and decided["phase"] == CHOSEN else ():
            if not np.array_equal(site.module.kept_pairs.cpu().numpy(), masks_of(site, decided.get("found", {}))):
                raise IntegrityError(f"{self.name}: the mask of {site.name} differs from the run's log")


def masks_of(site: AttentionSite, calibration: Mapping[str, Any]) -> np.ndarray:
    """Return the masks (h, t, t) of an attention module. Without calibration, one pair (1, 1, 1) suffices to count
    FLOPs."""
    if site.name not in calibration:
        return np.ones((1, 1, 1), bool)
    return vitcod_filter.read_masks(calibration[site.name]["masks"], site.heads, calibration[site.name]["tokens"])


def side_of(site: AttentionSite, count: int) -> int:
    """Return the side t of the square attention maps of a module. `count` is the number of elements of all its maps."""
    return math.isqrt(count // site.heads)


def positions_of(model: nn.Module, name: str) -> int:
    """Return the number of tokens of an image, from the model's position table. Raise RefusedError if there is no such
    table."""
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if path.rpartition(".")[2] in POSITIONS and tensor.ndim == 3:
            return tensor.shape[1]
    raise RefusedError(
        f"{name}: {class_name(model)} has no position table that limits the number of tokens",
        fix=f"--set techniques.{name}.tokens=NUMBER, the maximum number of tokens",
    )
