"""N-of-M sparsity (Zhou et al. 2021): train linear layers with n of every m weights, such as 2:4.

Paper       Zhou et al. 2021, SR-STE (arXiv 2102.04010). Also Hu et al. 2024 (arXiv 2404.01847), and Chmiel et al. 2022
            (arXiv 2203.10991) for `mvue`.
Promise     Masked weights are N:M sparse at every step and in the export. Half of the multiplications of a 2:4 forward
            pass can be skipped.
Use         model, optimizer = thrifty.apply((model, optimizer), "n_of_m", n=2, m=4, total_steps=10_000)
Start with  `n_of_m:n=2,m=4`. Use `where=mlp` as in the papers on Transformers.
Cost        One boolean per weight, new masks once in `every` steps, and one masking of the weights per pass.
Avoid       Adapters, because a merge fills masked weights. A dense finish (`dense_from`) while the learning rate decays
            to zero.
Does not    Save time without 2:4 hardware units, or prune embeddings, norms, biases, the head and layers outside the
            blocks.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.optimizer_steps import count_steps, finished_steps
from thrifty.core.ranks import mean_over_ranks
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Positive, Rate, SettingBound, check_pattern
from thrifty.core.shard_layout import local_shards, local_tensors
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, full_value
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.n_of_m_linear import NOfMProducts, has_sparse_units, masked_linear
from thrifty.kernels.n_of_m_masks import NOfMPattern, add_masked_decay
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.module_surgery import find_stacks, is_under, select, weight_layers, wrap_forward

MASK = "n_of_m_mask"
"""Name of the mask buffer of a masked layer. The mask has the shape of the layer's weight."""
PRODUCTS: ModuleNote[NOfMProducts] = ModuleNote("n_of_m")
IS_DENSE: ModuleNote[bool] = ModuleNote("n_of_m_dense")
MADE_AT: ModuleNote[int | None] = ModuleNote("n_of_m_made_at")
"""Version of the weight from which the mask was computed; None if `NOfMBackward` updates the masks."""


def use_masked_product(layer: nn.Module, products: NOfMProducts) -> None:
    """Make a linear layer (or `Conv1D`) compute with n of every m weights.

    A training loop must call `remake` after each update. Otherwise the next forward pass in training mode warns.
    """
    PRODUCTS.set(layer, products)
    IS_DENSE.set(layer, False)
    MADE_AT.set(layer, layer.weight._version)
    layer.register_buffer(MASK, _mask_for(layer))
    wrap_forward(layer, _multiply)


def remove_masked_product(layer: nn.Module) -> None:
    """Undo `use_masked_product`, and set masked weights to zero."""
    with torch.no_grad():
        layer.weight.mul_(layer.n_of_m_mask)
    for note in (PRODUCTS, IS_DENSE, MADE_AT):
        note.remove(layer)
    del layer.forward, layer.n_of_m_mask


def _multiply(layer: nn.Module, inner: Any, x: Tensor) -> Tensor:
    if IS_DENSE.of(layer):
        return inner(x)
    weight, mask = layer.weight, layer.n_of_m_mask
    if layer.training and torch.is_grad_enabled() and MADE_AT.of(layer) not in (None, weight._version):
        warnings.warn(
            "sparsity.n_of_m: weights have changed since their masks were computed. In your own loop, call "
            "remake(masked_layers(model)) of thrifty.techniques.sparsity.n_of_m after each update",
            stacklevel=2,
        )
    if is_transposed(layer):
        weight, mask = weight.T, mask.T
    return masked_linear(x, weight, mask, layer.bias, PRODUCTS.of(layer))


def _mask_for(layer: nn.Module) -> Tensor:
    weight = full_value(layer.weight)
    pattern = PRODUCTS.of(layer).pattern
    return pattern.mask(weight.T).T.contiguous() if is_transposed(layer) else pattern.mask(weight)


def masked_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, MASK)]


@torch.no_grad()
def remake(layers: Iterable[nn.Module]) -> Tensor:
    """Compute new masks from the weights. Return the numbers of changed elements and of all elements, (2,)."""
    changed = []
    for layer in layers:
        mask = _mask_for(layer)
        changed.append(torch.stack([(mask != layer.n_of_m_mask).sum(), torch.tensor(mask.numel(), device=mask.device)]))
        layer.n_of_m_mask.copy_(mask)
        MADE_AT.set(layer, layer.weight._version)
    return torch.stack(changed).sum(0).float() if changed else torch.zeros(2)


@torch.no_grad()
def decay_masked(layers: Iterable[nn.Module], decay: float) -> None:
    """Add `decay` times each masked weight to its gradient. A weight that several layers share is decayed once."""
    for layer in {id(layer.weight): layer for layer in layers}.values():
        if layer.weight.grad is None:
            continue
        weight, gradient = local_tensors([layer.weight, layer.weight.grad])
        for part in local_shards(layer.weight):
            mask = layer.n_of_m_mask[part.box.slices]
            add_masked_decay(gradient[part.place], weight[part.place], mask, decay)


class NOfMBackward:
    """A backward pass over all micro-batches and ranks. It first computes new masks if they are due.

    `state` has the number of calls ("step") and of mask computations ("made"). The first call always computes masks.
    """

    def __init__(self, inner: Backward, settings: "NOfM"):
        self.inner, self.settings = inner, settings
        # torch.tensor is readable while shapes are traced
        self.state = {name: torch.tensor(0) for name in ("step", "made")}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        step, made = (int(count) for count in self.state.values())
        self.state["step"].add_(1)
        layers, notes = masked_layers(model), {}
        dense = step >= int(self.settings.dense_from)
        if dense:
            fill_masks(layers)
        elif step % self.settings.every == 0 or not made:
            self.state["made"].add_(1)
            changed, elements = mean_over_ranks(remake(layers).to(batch.weight.device))
            if not isinstance(changed, FakeTensor):
                notes["mask_flip_rate"] = float(changed / elements.clamp_min(1))
        for layer in layers:
            MADE_AT.set(layer, None)
        outcome = self.inner(model, objective, batch)
        if self.settings.decay and not dense:
            decay_masked(layers, self.settings.decay)
        return replace(outcome, notes=outcome.notes | notes)


def fill_masks(layers: Iterable[nn.Module]) -> None:
    """Make the layers dense: set all mask elements to True."""
    for layer in layers:
        if not IS_DENSE.of(layer):
            layer.n_of_m_mask.fill_(True)
            IS_DENSE.set(layer, True)


class NOfM(Technique):
    """The gradient of the masked weight updates the whole weight, and masked elements decay (SR-STE). Hu et al. add the
    decay on gradients, transposable masks, the flip rate and the dense finish. With `transposable` the weight is also
    N:M sparse along its columns. Half of the multiplications for the input's gradient can then be skipped. With `mvue`,
    half of the multiplications for the weight's gradient can be skipped. With `dense_from`, the last steps train the
    dense weight, and the run exports it.

    On GPUs with 2:4 units, torch computes the matmuls in 16 bits. torchao published speedups on an A100 (feature since
    removed): 1.24 to 1.27 times for one layer, 6 % for a ViT-L. SR-STE's code uses a decay of 2e-4. Hu et al. use 6e-5
    for GPT-2 of 124M and 774M, 2e-4 for 350M and 1558M. The metric "mask_flip_rate" is the fraction of mask elements
    that changed. Sharded weights are also gathered to compute masks, and every rank holds all masks.
    """

    stage, numerics = Stage.SPARSITY, Numerics.DIFFERENT
    claims = frozenset({Claim.LINEAR_PRODUCTS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.WEIGHT_MASKS: "a weight would have two independent masks",
        Claim.FROZEN_BASE_WEIGHTS: "a merged adapter is not N:M sparse",
    }

    n: Positive = 2
    """Number of unmasked weights in each group of m neighbors along a layer's inputs."""
    m: Annotated[int, SettingBound(least=2, most=32)] = 4
    transposable: bool = False
    """True for masks that are also N:M along a layer's outputs. Each m × m tile gets the best such mask (m up to 4)."""
    decay: Rate = 2e-4
    """Decay of masked weights: `decay` times the weight is added to its gradient. 0 is the straight-through estimator
    without decay."""
    every: Positive = 1
    """Number of steps between mask computations."""
    dense_from: MovingMoment = 1.0
    """First step of dense training at the end of the run."""
    mvue: bool = False
    """True to compute weight gradients from a minimum-variance unbiased estimate of the output gradients. The estimate
    is N:M sparse along tokens."""
    where: str = ""
    """Regular expression that is searched in layer names to choose the masked layers; empty for all. The papers on
    Transformers use "mlp"."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward", "changes"})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self, self.name, "where")
        _ = self.pattern  # raises for an invalid pattern

    @property
    def pattern(self) -> NOfMPattern:
        try:
            return NOfMPattern(self.n, self.m, self.transposable)
        except ThriftyError as error:
            raise type(error)(f"{self.name}: {error.what}", fix=error.fix) from None

    def model(self, model: nn.Module) -> nn.Module:
        on_units = has_sparse_units(next(model.parameters()).device, self.pattern)
        for layer in self.layers(model).values():
            use_masked_product(layer, NOfMProducts(self.pattern, self.mvue, on_units))
        add_note("sparse products on 2:4 units, in 16 bits" if on_units else "dense products of masked weights")
        return model

    def layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """Return the masked layers by name. Raise RefusedError if there are none."""
        stacks = find_stacks(model)
        kinds = {type(layer) for layer in weight_layers(model).values() if is_transposed(layer)}

        def skip(name: str, layer: nn.Module) -> str | None:
            if not any(is_under(name, stack) for stack in stacks):
                return "it is outside the blocks"
            return _reason_to_skip(layer, self.pattern)

        return select(model, (nn.Linear, *kinds), self.where, skip).matched

    def backward(self, backward: Backward) -> Backward:
        return NOfMBackward(backward, self)

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        layers = masked_layers(model)
        count_steps(optimizer)

        def decay(*_: object) -> None:
            if self.decay and not IS_DENSE.of(layers[0]):
                decay_masked(layers, self.decay)

        def follow(*_: object) -> None:
            step = finished_steps(optimizer)
            if step >= int(self.dense_from):
                fill_masks(layers)
            elif step % self.every == 0:
                remake(layers)
            for layer in layers:
                MADE_AT.set(layer, layer.weight._version)

        optimizer.register_step_pre_hook(decay)
        optimizer.register_step_post_hook(follow)

    def changes(self, step: int, state: TrainState) -> None:
        """Set the step counter, because a run may be forked from a run without masks. The model's structure does not
        change."""
        if state.model is not None:
            state.techniques[self.name]["step"].fill_(step)

    def finish(self, model: nn.Module) -> nn.Module:
        for layer in masked_layers(model):
            remove_masked_product(layer)
        return model

    def holds(self, state: TrainState) -> None:
        assert state.model is not None
        dense = state.step > int(self.dense_from)
        for name, module in state.model.named_modules():
            mask = getattr(module, MASK, None)
            if mask is None:
                continue
            if dense and not mask.all():
                raise IntegrityError(f"{self.name}: {name} is masked at step {state.step}, after dense_from")
            if not dense and not self.pattern.admits(mask.T if is_transposed(module) else mask):
                directions = " along inputs and outputs" if self.transposable else ""
                raise IntegrityError(f"{self.name}: the mask of {name} keeps more than {self.pattern}{directions}")


def _reason_to_skip(layer: nn.Module, pattern: NOfMPattern) -> str | None:
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its attention reads the weight directly"
    if "forward" in vars(layer) or (isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward):
        return f"the product of a {type(layer).__name__} is unknown"
    shape = tuple(layer.weight.shape[::-1] if is_transposed(layer) else layer.weight.shape)
    if not pattern.fits(shape):
        return f"its {shape[1]} inputs and {shape[0]} outputs do not divide into groups of {pattern.m}"
    return None
