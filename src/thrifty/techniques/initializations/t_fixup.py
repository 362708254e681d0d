"""T-Fixup (Huang et al. 2020): scale the initialization to train without norms and warm-up.

Paper       Huang, Perez, Ba and Volkovs 2020, Improving Transformer Optimization Through Better Initialization (ICML),
            section 3.2.
Promise     The first updates of Adam stay bounded without norms, at the full learning rate from step 0.
Use         model = thrifty.apply(model, "t_fixup")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `t_fixup`, without a warm-up. Embeddings are multiplied by sqrt(width); `multiplier=1` leaves them unscaled.
Cost        None. Norms are not computed.
Avoid       Pretrained weights, because all weights except position embeddings are reinitialized.
Does not    Keep the plain architecture, or export the trained model as a plain model.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Rate
from thrifty.modeling.embeddings import multiply, own_multiplier, stack_after, token_tables
from thrifty.modeling.module_surgery import weight_layers
from thrifty.modeling.residual_branches import Blocks, biases, depths, find_branches, is_decoder
from thrifty.modeling.stream_norms import NormFreeTechnique, bypass_norms
from thrifty.techniques.initializations._branch_matrices import draw_xavier, matrices, outer_matrices


def encoder_factor(depth: int) -> float:
    """Return 0.67 N^(-1/4), the factor of value, output and MLP matrices in an encoder of N blocks."""
    return 0.67 * depth**-0.25


def decoder_factor(depth: int) -> float:
    """Return (9M)^(-1/4), the factor of matrices in a decoder of M blocks.

    The embedding before a stack of M blocks has the same factor.
    """
    return (9 * depth) ** -0.25


@torch.no_grad()
def draw(model: nn.Module, stacks: Mapping[str, Blocks], seed: int) -> None:
    """Initialize every matrix and token table, and set the biases of linear layers to zero."""
    depth_of = depths(model, stacks)
    for stack, blocks in stacks.items():
        rule, scale = ("decoder", decoder_factor) if is_decoder(blocks) else ("encoder", encoder_factor)
        add_note(f"{stack or 'the model'} uses the {rule}'s factor, {scale(depth_of[stack]):.3g}")
        for branch in (branch for branches in blocks for branch in branches):
            draw_xavier(matrices(branch), seed, scale(depth_of[stack]), unscaled=("query", "key"))
    draw_xavier(outer_matrices(model), seed)
    for layer in weight_layers(model).values():
        for bias in biases(layer):
            bias.zero_()
    initialized: set[int] = set()
    for name, table in token_tables(model).items():
        if id(table.weight) not in initialized:
            initialized.add(id(table.weight))
            std = table.embedding_dim**-0.5 * decoder_factor(depth_of[stack_after(name, stacks)])
            table.weight.normal_(0.0, std, generator=keyed_generator(f"{seed}/{name}.weight", table.weight))


def multiply_embeddings(model: nn.Module, multiplier: float) -> None:
    """Multiply token embeddings by `multiplier`. 0 means sqrt(width), or 1 if the model has its own multiplier."""
    for name, table in token_tables(model).items():
        if multiplier == 0.0 and own_multiplier(model, table) != 1.0:
            add_note(f"the model itself multiplies the output of {name}")
            continue
        factor = multiplier or table.embedding_dim**0.5
        multiply(table, factor)
        add_note(f"the output of {name} is multiplied by {factor:.4g}")


class TFixup(NormFreeTechnique):
    """All matrices start from Xavier's uniform values. Value, attention output and MLP matrices are then scaled. The
    factor is 0.67 N^(-1/4) in an encoder of N blocks, and (9M)^(-1/4) in a decoder of M blocks. Token embeddings start
    from N(0, d^(-1/2)) times (9N)^(-1/4). Queries and keys keep Xavier's values. Each slice of a fused matrix is
    initialized for the size of the slice. A tied table is initialized once. Factors are computed from the initial depth
    of the run.

    Embeddings are multiplied by sqrt(d) in the forward pass, as in the original Transformer, unless the model does so
    itself. Differs from the paper: the paper treats encoder-decoders only. Here a decoder without cross-attention uses
    the encoder's factor.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it reinitializes the weights that adapters keep frozen",
        Claim.TRAINED_START: "all weights but positions are reinitialized",
    }

    multiplier: Rate = 0.0
    """Factor of token embeddings; 0 means sqrt(width), or no factor if the model has its own multiplier."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""
    seed: int = 0
    """Seed of the initialization, together with each parameter's name."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_branches(model, self.where)
        draw(model, stacks, self.seed)
        multiply_embeddings(model, self.multiplier)
        bypass_norms(model)
        return model
