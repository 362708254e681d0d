"""Fixup (Zhang et al. 2019): replace norms by scaled initialization, zeroed branches and scalars.

Paper       Zhang, Dauphin and Ma 2019, Fixup Initialization (arXiv 1901.09321). The three rules of section 3 are
            applied as in the authors' Transformer.
Promise     The first update changes the function by the same amount at any depth. Norms are not needed.
Use         model, optimizer = thrifty.apply((model, optimizer), "fixup")
Start with  `fixup`, with dropout or mixup, since the removed norms also regularize.
Cost        About seven scalars per block, each with one elementwise operation. Norms are not computed.
Avoid       Pretrained weights, because every block is reinitialized.
Does not    Keep the plain architecture, or export the trained model as a plain model.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Fraction, Rate
from thrifty.modeling.embeddings import find_heads, is_tied, size_stream, token_tables
from thrifty.modeling.module_surgery import is_under
from thrifty.modeling.residual_branches import (
    Blocks,
    ResidualBranch,
    add_gain,
    biases,
    depths,
    find_branches,
    is_decoder,
)
from thrifty.modeling.stream_norms import NormFreeTechnique, bypass_norms
from thrifty.optim.transform_elements import ScaleParameters
from thrifty.techniques.initializations._branch_matrices import draw_xavier, matrices


def depth_factor(branches: int, matrices: int) -> float:
    """Return Fixup's factor for matrices of a branch, L^(-1 / (2m - 2)).

    L is the number of residual branches of the model, m the number of matrices of the branch. A single matrix has
    factor 1, because it starts at 0.
    """
    return branches ** (-1 / (2 * matrices - 2)) if matrices > 1 else 1.0


def branches_in_path(stacks: Mapping[str, Blocks], depths: Mapping[str, int]) -> dict[str, int]:
    """Return the number L of branches on the path through the model, by stack.

    If one stack attends to another, L counts the branches of all stacks. Otherwise L counts the branches of each stack
    separately. `depths` has the number of blocks of each stack.
    """
    counts = {stack: sum(map(len, blocks)) * depths[stack] // len(blocks) for stack, blocks in stacks.items()}
    return dict.fromkeys(counts, sum(counts.values())) if are_joined(stacks) else counts


def are_joined(stacks: Mapping[str, Blocks]) -> bool:
    """Return True if the stacks form one path.

    Stacks form one path if there is only one stack, or if one stack attends to another. They also form one path if each
    stack has half of every block, as with attentions in one list and MLPs in another.
    """
    halves = all(len(blocks[0]) == 1 for blocks in stacks.values())
    return len(stacks) == 1 or halves or any(is_decoder(blocks) for blocks in stacks.values())


@torch.no_grad()
def draw(branch: ResidualBranch, branches: int, seed: int) -> None:
    """Initialize a branch as in Fixup: matrices are scaled random values, the last matrix and the biases are zero.

    `branches` is the number L of branches of the model.
    """
    factors = matrices(branch)
    scale = depth_factor(branches, len(factors))
    draw_xavier(factors[:-1], seed, scale)
    factors[-1].values.zero_()
    for layer in (*branch.inner.values(), branch.last):
        for bias in biases(layer):
            bias.zero_()


def add_scalars(branch: ResidualBranch) -> None:
    """Add a scalar before each layer, a scalar after each inner layer of an MLP, and a multiplier at the end."""
    for layer in {id(layer): layer for layer in (*branch.inner.values(), branch.writer)}.values():
        layer.shift = _scalar(branch, 0.0)
        layer.register_forward_pre_hook(_shift_input, with_kwargs=True)
    if branch.kind == "mlp":
        for layer in branch.inner.values():
            add_shift_after(layer, _scalar(branch, 0.0))
    add_gain(branch.writer, _scalar(branch, 1.0))


def add_shift_after(module: nn.Module, scalar: nn.Parameter) -> None:
    module.shift_after = scalar
    module.register_forward_hook(_shift_output)


def is_scalar(name: str, parameter: Tensor) -> bool:
    return name.rpartition(".")[2] in ("gain", "shift", "shift_after") and parameter.numel() == 1


def _scalar(branch: ResidualBranch, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((1,), value, device=branch.last.weight.device))


def _shift_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs = 3 if isinstance(module, nn.MultiheadAttention) else 1  # query, key and value
    positional = tuple(x + module.shift.to(x.dtype) for x in args[:inputs])
    named = {k: x + module.shift.to(x.dtype) for k, x in kwargs.items() if k in ("input", "query", "key", "value")}
    return (*positional, *args[inputs:]), kwargs | named


def _shift_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.shift_after.to(output.dtype)


class Fixup(NormFreeTechnique):
    """Rules of the paper:

    (1) The last layer of each branch and an untied output head start at 0.
    (2) The other matrices of a branch start from Xavier's values times L^(-1 / (2m - 2)). L is the number of branches
        in the model and m the number of matrices in the branch: 2 in an MLP, 3 in a gated MLP, 4 in attention.
    (3) A learned scalar is added before each linear layer and activation of a branch, and one scales the output.

    L counts 2 branches per encoder block and 3 per decoder block, at the initial depth of the run. Scalars train
    at a tenth of the learning rate, as in the authors' ResNet, without weight decay. A tied head keeps the
    embedding's values. Embeddings are multiplied so that the residual stream starts with a root mean square of 1. Norms
    of queries and keys, and norms in the head, are not removed.

    Differs from the paper: each slice of a fused matrix is initialized separately. Its values are sqrt(2) times
    larger than in the authors' code, which initializes a fused matrix as a whole.
    """

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it reinitializes the weights that adapters keep frozen",
        Claim.TRAINED_START: "the weights of its blocks are reinitialized",
    }

    scalar_rate: Fraction = 0.1
    """Learning rate of the scalars, relative to the learning rate of the weights."""
    multiplier: Rate = 0.0
    """Factor of all embeddings; with 0, the residual stream starts with a root mean square of 1."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""
    seed: int = 0
    """Seed of the initialization, together with each parameter's name."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_branches(model, self.where)
        lengths = branches_in_path(stacks, depths(model, stacks))
        for stack, blocks in stacks.items():
            for branch in (branch for branches in blocks for branch in branches):
                draw(branch, lengths[stack], self.seed)
                add_scalars(branch)
        add_note(f"L is {' and '.join(map(str, sorted(set(lengths.values()))))}")
        if are_joined(stacks):
            _start_heads_at_zero(model)
        else:
            add_note("separate stacks have no common head, so no head starts at 0")
        size_stream(model, self.multiplier)
        for name, norm in bypass_norms(model).matched.items():
            if not any(is_under(name, stack) for stack in stacks) and "embed" not in name.lower():
                add_shift_after(norm, nn.Parameter(torch.zeros(1, device=next(model.parameters()).device)))
        return model

    def update(self, transform: GradientTransform) -> GradientTransform:
        return chain(transform, ScaleParameters(self.scalar_rate, is_scalar))


@torch.no_grad()
def _start_heads_at_zero(model: nn.Module) -> None:
    heads, tables = find_heads(model), token_tables(model)
    if not heads:
        add_note("the model has no head that could start at 0")
    for name, head in heads.items():
        if is_tied(head, tables):
            add_note(f"{name} is tied to the embedding and keeps its values")
            continue
        head.weight.zero_()  # type: ignore[operator]
        for bias in biases(head):
            bias.zero_()
        add_note(f"{name} starts at 0")
