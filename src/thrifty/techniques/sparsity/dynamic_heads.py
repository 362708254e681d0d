"""S²ViTE (Chen et al. 2021): train with a subset of attention heads and replace the least important ones.

Paper       Chen et al. 2021, Chasing Sparsity in Vision Transformers (arXiv 2106.04533), structured sparsity. Heads are
            dropped and grown as weights in RigL (Evci et al. 2020, arXiv 1911.11134). Details unverified.
Promise     Each block has a constant number of active heads, and training replaces some of them. The final model is
            smaller.
Use         model, optimizer = thrifty.apply((model, optimizer), "dynamic_heads", density=0.5, total_steps=10_000)
Start with  `dynamic_heads:density=0.5,alpha=0.5`. `neurons=0.5` also prunes feed-forward neurons.
Cost        All heads are computed during training, because growth needs their gradients. Only the output projection can
            skip inactive heads (sparsity.sparse_products).
Avoid       Few heads per block. If alpha · density · heads is below 0.5, no head is ever replaced, and a note reports
            this.
Does not    Mask queries, keys and values; in a dropped head their weights have no gradient and only decay.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Fraction, Positive, Probability
from thrifty.core.shard_layout import order_of
from thrifty.core.state import TrainState, full_value
from thrifty.modeling.structured_pruning import PrunableUnits, find_columns, find_units, prune_units
from thrifty.optim.mask_selection import Shapes, drop_fraction, largest, replace_connections, shard_like_parameter
from thrifty.optim.weight_masks import LayerReader, check_masks, masks_in
from thrifty.techniques.sparsity._mask_techniques import MaskTechnique


def by_piece(values: Tensor, pieces: int, dim: int = 1) -> Tensor:
    """Group an output layer's weight (out, in) by its n heads or neurons. The result is (n, out · in / n). `dim` is the
    dimension of the columns, 0 for a weight (in, out)."""
    return values.unflatten(dim, (pieces, -1)).movedim(dim, 0).flatten(1)


def columns_of(kept: Tensor, shape: Sequence[int], dim: int = 1) -> Tensor:
    """Expand a mask (n,) of n heads or neurons to the shape of the output layer's weight."""
    columns = kept.repeat_interleave(shape[dim] // len(kept))
    return (columns if dim else columns[:, None]).expand(*shape).contiguous()


def moved_pieces(kept: Tensor, weight: Tensor, gradient: Tensor, fraction: float, dim: int = 1) -> Tensor:
    """Return the new mask (n,) of n heads or neurons after a drop-and-grow step.

    The `fraction` of active heads or neurons with the smallest |sum of weight · gradient| is dropped. The same number
    of inactive ones, with the largest gradient norm, becomes active. `weight` and `gradient` (out, in) belong to the
    branch's output layer.
    """
    importance = by_piece(weight.double() * gradient, len(kept), dim).sum(1).abs()
    return replace_connections(kept, importance, by_piece(gradient.double(), len(kept), dim).norm(dim=1), fraction)


class DynamicHeads(MaskTechnique):
    """Heads with the smallest |sum of weight · gradient| are dropped. This score is a first-order Taylor estimate of
    the loss change without the head. Heads whose output weights have the largest dense gradient are grown, and start at
    zero. A head is a group of columns of the attention's output layer. Heads that share a key and a value are dropped
    and grown together. With `neurons` below 1, feed-forward neurons are dropped and grown in the same way.

    At the end of the run, dropped heads are removed from the matrices. The smaller model computes the same outputs
    within rounding. Hugging Face formats that cannot store fewer heads (GPT-2, BERT, ViT) store zeros instead.
    sparsity.early_bird chooses heads once and then trains the smaller model.
    """

    claims = frozenset({Claim.WEIGHT_MASKS, Claim.HEADS_AND_NEURONS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it drops and grows weights that adapters keep frozen",
        Claim.TENSOR_PARALLELISM: "heads are compared with each other, and each rank has only some",
        Claim.PIPELINE_PARALLELISM: "one rank must know the heads of all blocks",
        Claim.SHARED_PARAMETERS: "each block keeps its own heads",
        Claim.WIDTH: "both change the width of the blocks",
    }

    density: Fraction = 0.5
    """Kept fraction of the heads of each block, at least one head."""
    neurons: Fraction = 1.0
    """Kept fraction of the neurons of each feed-forward network."""
    every: Positive = 100
    """Number of steps between drop-and-grow steps."""
    alpha: Probability = 0.5
    """Initial fraction of active heads that a drop-and-grow step replaces; annealed by cosine."""
    until: MovingMoment = 0.8
    seed: int = 0

    @cached_property
    def counts(self) -> dict[str, tuple[int, int, int]]:
        """Number of all and of active heads or neurons, and the dimension of their columns, by name of the masked
        weight. Filled by `model`."""
        return {}

    def model(self, model: nn.Module) -> nn.Module:
        masked = self._masked(model)
        if not masked:
            add_note("every head stays, since density leaves all heads of a block")
        for pieces in masked:
            kept = self.kept_count(pieces)
            self.counts[f"{pieces.name}.weight"] = pieces.count, kept, pieces.dim
            moves = self.moves_at(self.every) and round(self.fraction(self.every) * kept)
            add_note(f"{kept} of {pieces.count} {pieces.kind} a block" + ("" if moves else ", which never move"))
        return model

    def _masked(self, model: nn.Module) -> list[PrunableUnits]:
        try:
            found = find_units(model)
        except RefusedError:  # they can be set to zero, but not be removed
            found = find_columns(model, self.neurons < 1)
            if not found:
                raise
        return [pieces for pieces in found.values() if self.kept_count(pieces) < pieces.count]

    def kept_count(self, pieces: PrunableUnits) -> int:
        return max(round((self.density if pieces.kind == "heads" else self.neurons) * pieces.count), 1)

    def moves_at(self, step: int) -> bool:
        return 0 < step < int(self.until) and step % self.every == 0 and self.alpha > 0

    def fraction(self, step: int) -> float:
        """Return the fraction of active heads or neurons that a step drops and grows."""
        return drop_fraction(step, self.alpha, int(self.until))

    def masked(self, shapes: Shapes) -> list[str]:
        return [name for name in shapes if name in self.counts]

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        masks = {}
        for name, parameter in parameters.items():
            count, kept, dim = self.counts[name]
            random_scores = torch.rand(count, generator=keyed_generator(f"{self.seed}/{name}"))
            masks[name] = shard_like_parameter(
                columns_of(largest(random_scores, kept), parameter.shape, dim), parameter
            )
        return masks

    def next_masks(self, names: Sequence[str], layer: LayerReader, step: int) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            matrix = layer(name)
            count, _, dim = self.counts[name]
            kept = by_piece(matrix.mask, count, dim).any(1)
            pieces = moved_pieces(kept, matrix.weight, matrix.gradient, self.fraction(step), dim)
            yield name, columns_of(pieces, matrix.mask.shape, dim)

    def finish(self, model: nn.Module) -> nn.Module:
        """Remove the dropped heads and neurons, whose output is zero. If they cannot be removed, the zeros stay."""
        for pieces in self._masked(model):
            if not pieces.rows:
                add_note(f"{pieces.name}: the weights of dropped {pieces.kind} stay, as zeros")
                continue
            sizes = by_piece(pieces.writer.weight.detach(), pieces.count, pieces.dim).norm(dim=1)
            prune_units(pieces, largest(sizes, self.kept_count(pieces)).nonzero().flatten().tolist())
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        masks, units = masks_in(state), {f"{each.name}.weight": each for each in self._masked(state.model)}
        for name, pieces in units.items():
            mask = by_piece(full_value(masks[name], order_of(masks[name])), pieces.count, pieces.dim)
            if not torch.equal(mask.any(1), mask.all(1)) or int(mask.any(1).sum()) != self.kept_count(pieces):
                kept = f"{int(mask.any(1).sum())} {pieces.kind}, not all whole"
                raise IntegrityError(
                    f"{self.name}: {name} keeps {kept}, and must keep {self.kept_count(pieces)} whole {pieces.kind}"
                )
        check_masks(self.name, state, {})
