"""Intrinsic dimension (Li et al. 2018): train d coordinates in a random subspace of all weights.

Paper       Li et al. 2018, Measuring the Intrinsic Dimension of Objective Landscapes (arXiv 1804.08838), section 2. For
            fine-tuning: Aghajanyan et al. 2021 (arXiv 2012.13255), section 3, with Fastfood as the projection.
Promise     The weights are θ₀ + P z for a fixed random P, and optimizer state exists only for the d values of z. The
            smallest d with 90 % of full quality (d90) measures task difficulty.
Use         optimizer = thrifty.optim.AdamW(network, lr=1e-2)
            thrifty.apply((network, optimizer), "intrinsic_dimension", dimension=1000)
Start with  `intrinsic_dimension:dimension=1000` and a usual learning rate. Double d until quality stops rising.
Cost        Memory grows: θ₀ is a second copy of the weights, P adds 5 bytes per weight, and all weight gradients exist
            briefly. Each step applies P and its transpose once.
Avoid       Saving memory; this is a measuring instrument. LoRA learns more with the same number of parameters.
Does not    Store P as a matrix. The exported model has the plain architecture, with P z added to the weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive
from thrifty.kernels.hadamard import Fastfood, draw_fastfood
from thrifty.modeling.adapter_base import ALSO_TRAINED, AdapterTechnique, train_only

NAME = "subspace"
"""Of the parameter z."""


class RandomSubspace:
    """The weights of a model as a function of z: θ₀ + P z."""

    def __init__(self, weights: list[nn.Parameter], projection: Fastfood):
        self.weights, self.projection = weights, projection
        self.origin = torch.cat([weight.detach().flatten().float() for weight in weights])
        self.is_placed = False
        """Whether z is known not to have changed: while one step's gradients are being found."""

    @torch.no_grad()
    def place(self, z: Tensor) -> None:
        """Put the weights where z says."""
        if self.is_placed:
            return
        values = self.origin + self.projection.apply(z)
        for weight, value in zip(self.weights, values.split([w.numel() for w in self.weights]), strict=True):
            weight.copy_(value.view_as(weight))

    @contextmanager
    def gradients_of(self, z: Tensor) -> Iterator[None]:
        """Inside, the weights are where z says and have gradients."""
        self.place(z)
        self.is_placed = True
        for weight in self.weights:
            weight.requires_grad_(True)
        try:
            yield
        finally:
            self.is_placed = False
            for weight in self.weights:
                weight.requires_grad_(False)

    @torch.no_grad()
    def take_gradients(self) -> Tensor:
        """The gradient of z, from those of the weights, which are given up."""
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        for weight in self.weights:
            weight.grad = None
        return self.projection.apply_transposed(flat)


CONFINED: ModuleNote[RandomSubspace] = ModuleNote("confined")
PLACING: ModuleNote[RemovableHandle] = ModuleNote("placing")


def restrict_to_subspace(model: nn.Module, dimension: int, seed: int) -> RandomSubspace:
    """Give a model the parameter z, zero at first; its own parameters follow it before each forward pass."""
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    total = sum(weight.numel() for weight in weights)
    if dimension > total:
        raise RefusedError(f"dimension {dimension} is more than the {total} weights", fix=f"set {total} or less")
    # drawn on the processor: the same projection on every device
    projection = draw_fastfood(dimension, total, keyed_generator(f"{seed}/{NAME}"), weights[0].device)
    confined = CONFINED.set(model, RandomSubspace(weights, projection))
    model.subspace = nn.Parameter(torch.zeros(dimension, device=weights[0].device))
    PLACING.set(model, model.register_forward_pre_hook(_place))
    return confined


def _place(model: nn.Module, args: Any) -> None:
    CONFINED.of(model).place(model.subspace)


def subspace_backward(backward: Backward) -> Backward:
    """A backward pass that leaves the gradient of z in place of those of the weights."""

    def projected(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        confined = CONFINED.of(model)
        with confined.gradients_of(model.subspace):
            outcome = backward(model, objective, batch)
        model.subspace.grad = confined.take_gradients().to(model.subspace.dtype)
        return outcome

    return projected


class IntrinsicDimension(AdapterTechnique):
    """Differs from the papers: P is scaled so that the mean square of P z equals that of z, which allows usual learning
    rates; the papers use columns of length 1. The per-layer factors of Aghajanyan et al. are not implemented. Weight
    decay pulls z to zero, and so the weights to θ₀. P is applied once per step, for any number of micro-batches.
    """

    claims = AdapterTechnique.claims | {Claim.TRAINED_VECTORS}
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.DEPTH: "blocks that are added have no θ₀ in common with those they grew from",
        Claim.PARAMETER_SHARDING: "the projection needs all weights in one place",
        Claim.TENSOR_PARALLELISM: "the projection needs all weights in one place",
    }

    dimension: Positive = 1000
    """Numbers that are trained, d."""
    seed: int = 0
    """Of the projection."""

    def model(self, model: nn.Module) -> nn.Module:
        confined = restrict_to_subspace(model, self.dimension, self.seed)
        add_note(f"{len(confined.origin):,} weights in a subspace of {self.dimension:,} dimensions")
        ALSO_TRAINED.set(model, frozenset())  # a new head moves in the subspace as all weights do
        train_only(model, {NAME})
        return model

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        confined = CONFINED.of(model)

        def take(*_: object) -> None:
            model.subspace.grad = confined.take_gradients().to(model.subspace.dtype)
            for weight in confined.weights:
                weight.requires_grad_(False)

        def open_weights(*_: object) -> None:
            for weight in confined.weights if torch.is_grad_enabled() else ():
                weight.requires_grad_(True)

        model.register_forward_pre_hook(open_weights)
        optimizer.register_step_pre_hook(take)

    def backward(self, backward: Backward) -> Backward:
        return subspace_backward(backward)

    def finish(self, model: nn.Module) -> nn.Module:
        CONFINED.remove(model).place(model.subspace)
        PLACING.remove(model).remove()
        del model.subspace
        return model.requires_grad_(True)
