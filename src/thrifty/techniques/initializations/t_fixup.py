"""T-Fixup (Huang et al. 2020): train Transformers without norms and warm-up by scaled initialization.

Paper       Huang, Perez, Ba and Volkovs 2020, Improving Transformer Optimization Through Better Initialization (ICML),
            section 3.2.
Promise     The first updates of Adam stay bounded without norms, at the full learning rate from step 0.
Use         model = thrifty.apply(model, "t_fixup")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `t_fixup`, without a warm-up. `multiplier=1` leaves the embeddings unscaled.
Cost        None: the work of the norms is saved.
Avoid       Pretrained weights: everything but positions is reinitialized.
Does not    Keep the plain architecture, so that the trained model cannot be exported as one.
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
    """What value, output and mlp matrices of an encoder of N blocks are multiplied by: 0.67 N^(-1/4)."""
    return 0.67 * depth**-0.25


def decoder_factor(depth: int) -> float:
    """The same for a decoder of M blocks, and for the embedding in front of a stack: (9M)^(-1/4)."""
    return (9 * depth) ** -0.25


@torch.no_grad()
def draw(model: nn.Module, stacks: Mapping[str, Blocks], seed: int) -> None:
    """First values of every matrix and token table; biases of what is drawn become zero."""
    deep = depths(model, stacks)
    for stack, blocks in stacks.items():
        rule, scale = ("decoder", decoder_factor) if is_decoder(blocks) else ("encoder", encoder_factor)
        add_note(f"{stack or 'the model'} takes the {rule}'s factor, {scale(deep[stack]):.3g}")
        for branch in (branch for branches in blocks for branch in branches):
            draw_xavier(matrices(branch), seed, scale(deep[stack]), unscaled=("query", "key"))
    draw_xavier(outer_matrices(model), seed)
    for layer in weight_layers(model).values():
        for bias in biases(layer):
            bias.zero_()
    drawn: set[int] = set()
    for name, table in token_tables(model).items():
        if id(table.weight) not in drawn:
            drawn.add(id(table.weight))
            std = table.embedding_dim**-0.5 * decoder_factor(deep[stack_after(name, stacks)])
            table.weight.normal_(0.0, std, generator=keyed_generator(f"{seed}/{name}.weight", table.weight))


def multiply_embeddings(model: nn.Module, multiplier: float) -> None:
    """Multiply what the token tables give: by `multiplier`, or for 0 by sqrt(width) where the model does not itself."""
    for name, table in token_tables(model).items():
        if multiplier == 0.0 and own_multiplier(model, table) != 1.0:
            add_note(f"the model itself multiplies what {name} gives")
            continue
        factor = multiplier or table.embedding_dim**0.5
        multiply(table, factor)
        add_note(f"what {name} gives is multiplied by {factor:.4g}")


class TFixup(NormFreeTechnique):
    """All matrices start from Xavier's uniform values. Value, attention output and MLP matrices are then multiplied: in
    an encoder of N blocks by 0.67 N^(-1/4), in a decoder of M blocks by (9M)^(-1/4). Token embeddings start from N(0,
    d^(-1/2)) times (9N)^(-1/4). Queries and keys keep Xavier's values. Each part of a fused matrix is initialized by
    its own size. A tied table is initialized once. Factors follow the depth at which the run starts.

    Embeddings are multiplied by sqrt(d) in the forward pass, as in the original Transformer, unless the model does so
    itself. Differs from the paper: it treats encoder-decoders only; a decoder without cross-attention gets the
    encoder's factor here.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it redraws the weights that adapters keep frozen",
        Claim.TRAINED_START: "all weights but positions are redrawn",
    }

    multiplier: Rate = 0.0
    """What token embeddings are multiplied by on their way in; 0 is sqrt(width) unless the model does so itself."""
    where: str = ""
    """Pattern of the modules inside a block that write into the residual stream; empty finds them."""
    seed: int = 0
    """Of the first values, together with each parameter's name."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_branches(model, self.where)
        draw(model, stacks, self.seed)
        multiply_embeddings(model, self.multiplier)
        bypass_norms(model)
        return model
