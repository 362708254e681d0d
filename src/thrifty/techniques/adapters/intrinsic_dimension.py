"""Intrinsic dimension (Li et al. 2018): train d coordinates in a random subspace of all weights.

Paper       Li et al. 2018, Measuring the Intrinsic Dimension of Objective Landscapes (arXiv 1804.08838), section 2.
            Aghajanyan et al. 2021 (arXiv 2012.13255), section 3, fine-tunes with the Fastfood projection, which is also
            used here.
Promise     The weights are θ₀ + P z for a fixed random P, and only z has optimizer state. The smallest d with 90 % of
            full quality (d90) measures task difficulty.
Use         optimizer = thrifty.optim.AdamW(network, lr=1e-2)
            thrifty.apply((network, optimizer), "intrinsic_dimension", dimension=1000)
Start with  `intrinsic_dimension:dimension=1000` and a usual learning rate. Double `dimension` (d) until quality stops
            rising.
Cost        Memory grows by a second copy of the weights (θ₀), 5 bytes per weight for P, and short-lived gradients of
            all weights. Each step multiplies by P and by its transpose once.
Avoid       Fine-tuning to save memory, because this method needs more memory than full fine-tuning. LoRA learns more
            with the same number of parameters.
Does not    Store P as a matrix, or change the architecture of the exported model, because P z is added to the weights.
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
from thrifty.modeling.attention_cores import has_values

NAME = "subspace"
"""Name of the trained parameter z, the coordinates in the subspace."""


class RandomSubspace:
    """The weights of a model as a function θ₀ + P z of the vector z. θ₀ are the initial weights, P is a random
    projection.
    """

    def __init__(self, weights: dict[str, nn.Parameter], projection: Fastfood):
        self.names, self.weights, self.projection = list(weights), list(weights.values()), projection
        self.origin = self._flat()
        self.placed: tuple[int, int, Tensor] | None = None
        """The z for which the weights were last set: address, version and values; None if it is unknown."""
        self.is_loaded = False
        """True while weights are loaded from a state dict, and not z alone."""
        self.is_placed = False
        """True while a step computes gradients. `place` then does nothing, because z is constant."""

    @torch.no_grad()
    def place(self, z: Tensor) -> None:
        """Set the weights to θ₀ + P z for z (d,). Weights that already have these values are not written, because a
        backward pass may need them."""
        if self.is_placed or self._is_set_for(z):
            return
        for weight, value in self._values(z):
            weight.copy_(value)
        self._note(z)

    @torch.no_grad()
    def adopt(self, weights: list[nn.Parameter], z: Tensor) -> None:
        """Change θ₀ so that θ₀ + P z, for z (d,), are these weights, which were loaded."""
        self.weights = weights
        if not has_values(z):
            return
        if not all(torch.equal(weight, value.to(weight.dtype)) for weight, value in self._values(z)):
            self.origin = self._flat() - self.projection.apply(z)
        self._note(z)

    def _flat(self) -> Tensor:
        return torch.cat([weight.detach().flatten().float() for weight in self.weights])

    def _values(self, z: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each weight, and its values for z (d,) in the shape of the weight."""
        values = self.origin + self.projection.apply(z)
        for weight, value in zip(self.weights, values.split([w.numel() for w in self.weights]), strict=True):
            yield weight, value.view_as(weight)

    def _note(self, z: Tensor) -> None:
        self.placed = (z.data_ptr() if has_values(z) else 0, z._version, z.detach().clone())

    def _is_set_for(self, z: Tensor) -> bool:
        """Return True if the weights were last set for these values of z (d,)."""
        if self.placed is None or not has_values(z):
            return False
        *known, values = self.placed
        # values only last, because they are on the device; changes of `z.data` have no version
        return known == [z.data_ptr(), z._version] and torch.equal(values, z)

    @contextmanager
    def gradients_of(self, z: Tensor) -> Iterator[None]:
        """Set the weights to θ₀ + P z for z (d,). The weights require gradients inside the context."""
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
        """Return the gradient of z (d,), computed from the weight gradients. Clear the weight gradients."""
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in self.weights]
        flat = torch.cat([gradient.flatten().float() for gradient in gradients])
        for weight in self.weights:
            weight.grad = None
        return self.projection.apply_transposed(flat)


SUBSPACE: ModuleNote[RandomSubspace] = ModuleNote("random_subspace")
PLACEMENT_HOOKS: ModuleNote[list[RemovableHandle]] = ModuleNote("placement_hooks")


def restrict_to_subspace(model: nn.Module, dimension: int, seed: int) -> RandomSubspace:
    """Restrict training to a random subspace: before each forward pass, and before the weights are saved, set them to
    θ₀ + P z.

    z is a new parameter of the model, initially zero. θ₀ are the current weights, P is a random projection.
    """
    named = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    total = sum(weight.numel() for weight in named.values())
    if dimension > total:
        raise RefusedError(
            f"dimension '{dimension}' exceeds the {total} weights of the model",
            fix=f"dimension={total} or less",
        )
    # sampled on the CPU: the same projection on every device
    device = next(iter(named.values())).device
    projection = draw_fastfood(dimension, total, keyed_generator(f"{seed}/{NAME}"), device)
    subspace = SUBSPACE.set(model, RandomSubspace(named, projection))
    model.subspace = nn.Parameter(torch.zeros(dimension, device=device))
    hooks = [
        model.register_forward_pre_hook(_place),
        model.register_state_dict_pre_hook(_place),
        model.register_load_state_dict_pre_hook(_note_loaded),
        model.register_load_state_dict_post_hook(_adopt),
    ]
    PLACEMENT_HOOKS.set(model, hooks)
    return subspace


def _place(model: nn.Module, *_: Any) -> None:
    SUBSPACE.of(model).place(model.subspace)


def _note_loaded(model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    SUBSPACE.of(model).is_loaded = any(prefix + name in state for name, _ in model.named_parameters() if name != NAME)


def _adopt(model: nn.Module, *_: Any) -> None:
    subspace = SUBSPACE.of(model)
    if subspace.is_loaded:
        subspace.is_loaded = False
        subspace.adopt([model.get_parameter(name) for name in subspace.names], model.subspace)


def subspace_backward(backward: Backward) -> Backward:
    """Return a backward pass that stores the gradient of z instead of the gradients of the weights."""

    def projected(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        subspace = SUBSPACE.of(model)
        with subspace.gradients_of(model.subspace):
            outcome = backward(model, objective, batch)
        model.subspace.grad = subspace.take_gradients().to(model.subspace.dtype)
        return outcome

    return projected


class IntrinsicDimension(AdapterTechnique):
    """Differs from the papers: P is scaled so that P z and z have the same mean square, which allows usual learning
    rates; the papers use columns of length 1. The per-layer factors of Aghajanyan et al. are not implemented.

    Weight decay pulls z to zero, and therefore the weights to θ₀. P is applied once per step, for any number of
    micro-batches.
    """

    claims = AdapterTechnique.claims | {Claim.TRAINED_VECTORS}
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.DEPTH: "added blocks have no part in θ₀",
        Claim.PARAMETER_SHARDING: "the projection needs all weights on one device",
        Claim.TENSOR_PARALLELISM: "the projection needs all weights on one device",
    }

    dimension: Positive = 1000
    """Number of trained values, d."""
    seed: int = 0
    """Seed of the projection."""

    def model(self, model: nn.Module) -> nn.Module:
        subspace = restrict_to_subspace(model, self.dimension, self.seed)
        add_note(f"{len(subspace.origin):,} weights in a subspace of {self.dimension:,} dimensions")
        ALSO_TRAINED.set(model, frozenset())  # a new head is in the subspace, like all weights
        train_only(model, {NAME})
        return model

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        subspace = SUBSPACE.of(model)

        def take(*_: object) -> None:
            model.subspace.grad = subspace.take_gradients().to(model.subspace.dtype)
            for weight in subspace.weights:
                weight.requires_grad_(False)

        def open_weights(*_: object) -> None:
            for weight in subspace.weights if torch.is_grad_enabled() else ():
                weight.requires_grad_(True)

        model.register_forward_pre_hook(open_weights)
        optimizer.register_step_pre_hook(take)

    def backward(self, backward: Backward) -> Backward:
        return subspace_backward(backward)

    def finish(self, model: nn.Module) -> nn.Module:
        SUBSPACE.remove(model).place(model.subspace)
        for hook in PLACEMENT_HOOKS.remove(model):
            hook.remove()
        del model.subspace
        return model.requires_grad_(True)
