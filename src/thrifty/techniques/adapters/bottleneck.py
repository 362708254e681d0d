"""Bottleneck adapters (Houlsby et al. 2019): add small trained networks to every frozen block.

Paper       Houlsby et al. 2019, Parameter-Efficient Transfer Learning for NLP (arXiv 1902.00751), section 2. One
            adapter per block, after the feed-forward network, follows Pfeiffer et al. 2021 (arXiv 2005.00247).
Promise     The output x of a residual branch becomes x + W2 gelu(W1 x + b1) + b2. The model's function is nearly
            unchanged at step 0.
Use         model = thrifty.apply(model, "bottleneck", width=64)
            optimizer = thrifty.optim.AdamW(model, lr=3e-4)
Start with  `bottleneck:width=64` and the paper's learning rate of 3e-4. Set `placement=feed_forward` for one adapter
            per block.
Cost        Each adapter has 2 · width · d + width + d parameters for hidden size d. The adapters also run at inference.
Avoid       Deployments that require the plain architecture, because these adapters cannot be merged into the weights.
            LoRA adapters can be merged.
Does not    Rename parameters, or require names of layers, because residual branches are detected by structure, also in
            models of transformers.
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive, Rate
from thrifty.modeling.adapter_base import AdapterTechnique, head_names, names_ending, norm_names, train_only
from thrifty.modeling.module_surgery import change_first
from thrifty.modeling.residual_branches import find_branches

PARTS = ("adapter_down", "adapter_down_bias", "adapter_up", "adapter_up_bias")


def apply_bottleneck(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Return the output of a bottleneck adapter, x + W2 gelu(W1 x + b1) + b2.

    x is (..., d), W1 (width, d), b1 (width,), W2 (d, width) and b2 (d,).
    """
    return x + F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def draw_truncated_normal(values: Tensor, std: float, generator: torch.Generator | None = None) -> None:
    """Fill `values` with samples of a normal distribution that is truncated at two standard deviations."""
    largest = math.erf(math.sqrt(2))
    values.uniform_(-largest, largest, generator=generator).erfinv_().mul_(std * math.sqrt(2))


@torch.no_grad()
def add_bottleneck(writer: nn.Module, d: int, width: int, std: float, generator: torch.Generator | None = None) -> None:
    """Add a bottleneck adapter to a residual branch. `writer` is the output layer of the branch.

    The layer's (first) output passes through the adapter, and the adapter's parameters belong to the layer. Biases
    start at zero.
    """
    device = next(writer.parameters()).device
    for name, shape in zip(PARTS, ((width, d), (width,), (d, width), (d,)), strict=True):
        values = torch.zeros(shape, device=device)
        if len(shape) == 2:
            draw_truncated_normal(values, std, generator)
        setattr(writer, name, nn.Parameter(values))
    writer.register_forward_hook(_pass_bottleneck)


def _pass_bottleneck(writer: nn.Module, args: Any, output: Any) -> Any:
    return change_first(output, lambda x: apply_bottleneck(x, *(getattr(writer, name).to(x.dtype) for name in PARTS)))


class BottleneckAdapter(AdapterTechnique):
    """Norms are trained by default, as in the paper.

    Differs from the paper: the head is trained only with `head=true`, because the head of a language model is large;
    the paper trains the head. If a residual branch contains dropout, dropout runs after the adapter; in the published
    code dropout runs before the adapter.
    """

    width: Positive = 64
    placement: Literal["both", "feed_forward"] = "both"
    """Branches with an adapter: attention and feed-forward ("both"), or only feed-forward ("feed_forward")."""
    norms: bool = True
    """Train the norms too."""
    head: bool = False
    """Train the output head too, unless the head shares its weight with the embedding."""
    std: Rate = 1e-3
    """Standard deviation of the initial values of the matrices W1 and W2."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""
    seed: int = 0
    """Seed of the initial values, combined with each layer's name."""

    def model(self, model: nn.Module) -> nn.Module:
        stacks = find_branches(model, self.where, ends_only=True)
        branches = [branch for blocks in stacks.values() for block in blocks for branch in block]
        chosen = [branch for branch in branches if self.placement == "both" or branch.kind == "mlp"]
        if not chosen:
            raise RefusedError("no feed-forward branch was found", fix=f"--set techniques.{self.name}.placement=both")
        for branch in chosen:
            generator = keyed_generator(f"{self.seed}/{branch.name}", next(branch.writer.parameters()))
            add_bottleneck(branch.writer, branch.width, self.width, self.std, generator)
        add_note(f"{len(chosen)} adapters of width {self.width}")
        trained = names_ending(model, *PARTS)
        trained |= norm_names(model) if self.norms else set()
        train_only(model, trained | (head_names(model) if self.head else set()))
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        raise self.refuse_plain("networks after the branches")
