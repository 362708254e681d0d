"""LoRA: train a low-rank addition to frozen weights.

Paper     Hu et al. 2022, LoRA (arXiv 2106.09685), section 4.1; the rank-stabilised scale is
          Kalajdzievski 2023 (arXiv 2312.03732).
Promise   gradients and optimizer state only for the small factors; the function is unchanged at step 0.
Does not  touch the frozen weights: `merge` adds the product to them, `unmerge` puts the kept originals back exactly.
Avoid     for training from scratch. Changing rank at fixed alpha changes the effective rate unless `stabilised`.
Note      A starts as Kaiming-uniform, B as zero (the paper says Gaussian A; reference implementations do this). A fused
          query-key-value projection gets one factor pair over all three.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.bounds import Positive, Probability
from thrifty.core.errors import IntegrityError, Refused
from thrifty.core.randomness import keyed_generator
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.surgery import note, select, tied_names, wrap_forward
from thrifty.core.technique import Numerics, Technique


def low_rank_addition(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · x Aᵀ Bᵀ for x (..., in), A (rank, in), B (out, rank), as two thin products."""
    return F.linear(F.linear(x, a), b) * scale


def _with_addition(module: nn.Module, inner: Any, x: Tensor) -> Tensor:
    result = inner(x)
    if module.lora_merged:
        return result
    dropped = F.dropout(x, module.lora_dropout, module.training)
    return result + low_rank_addition(dropped, module.lora_a, module.lora_b, module.lora_scale)


def add_lora(
    linear: nn.Linear, rank: int, scale: float, dropout: float, generator: torch.Generator | None = None
) -> None:
    """Give a linear layer its factors, named `lora_a` and `lora_b` on the layer itself, and freeze the rest of it."""
    out_features, in_features = linear.weight.shape
    linear.lora_a = nn.Parameter(linear.weight.new_empty(rank, in_features))
    linear.lora_b = nn.Parameter(linear.weight.new_zeros(out_features, rank))
    nn.init.kaiming_uniform_(linear.lora_a, a=math.sqrt(5), generator=generator)
    linear.lora_scale, linear.lora_dropout, linear.lora_merged = scale, dropout, False
    wrap_forward(linear, _with_addition)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add every low-rank product to its weight, in float32, keeping the weight as it was for `unmerge`."""
    for module in model.modules():
        if hasattr(module, "lora_a") and not module.lora_merged:
            module.lora_base = module.weight.detach().clone()
            addition = module.lora_b.float() @ module.lora_a.float() * module.lora_scale
            module.weight.copy_(module.weight.float() + addition)
            module.lora_merged = True


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Put back the weights that `merge` kept: bit for bit, in any precision."""
    for module in model.modules():
        if getattr(module, "lora_merged", False):
            module.weight.copy_(module.lora_base)
            module.lora_merged = False
            del module.lora_base


@dataclass(frozen=True)
class Lora(Technique):
    stage, numerics = Stage.ADAPTERS, Numerics.DIFFERENT
    claims = frozenset({"frozen base weights"})

    rank: Positive = 8
    alpha: float = 16.0
    dropout: Probability = 0.0
    where: str = r"attention|attn|mlp|fc|dense|proj"
    """Pattern that the name of a linear layer must contain."""
    stabilised: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    seed: int = 0
    """Of the first values of A, together with each layer's name."""

    def model(self, model: nn.Module) -> nn.Module:
        tied = set(tied_names(model)) | set(tied_names(model).values())

        def skip(name: str, module: nn.Module) -> str | None:
            return "its weight is tied" if f"{name}.weight" in tied else None

        selection = select(model, nn.Linear, self.where, skip)
        model.requires_grad_(False)
        scale = self.alpha / (math.sqrt(self.rank) if self.stabilised else self.rank)
        for name, module in selection.matched.items():
            if self.rank > min(module.weight.shape):
                raise Refused(
                    f"rank {self.rank} is larger than a weight of shape {tuple(module.weight.shape)}",
                    fix=f"use a rank of at most {min(module.weight.shape)}",
                )
            add_lora(module, self.rank, scale, self.dropout, keyed_generator(f"{self.seed}/{name}", module.weight))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        note(f"{trained:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        merge(model)
        for module in model.modules():
            if hasattr(module, "lora_a"):
                del module.lora_a, module.lora_b, module.lora_base, module.forward
        return model.requires_grad_(True)

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        wrong = [n for n, p in state.model.named_parameters() if p.requires_grad != n.endswith(("lora_a", "lora_b"))]
        if wrong:
            raise IntegrityError(f"{self.name}: only the factors may be trained, but {wrong[0]} says otherwise")
