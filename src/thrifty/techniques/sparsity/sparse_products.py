"""Sparse products (Gale et al. 2020): multiply by unmasked weights only, if that is faster.

Paper       Gale et al. 2020, Sparse GPU Kernels for Deep Learning (arXiv 2006.10901). Blocks: Gray et al. 2017, GPU
            Kernels for Block-Sparse Weights.
Promise     The time of matmuls falls with the density of the masks. A layer uses sparse matmuls only if they are
            measured to be faster.
Use         model, optimizer = thrifty.apply((model, optimizer), "static", density=0.05)
            model, optimizer = thrifty.apply((model, optimizer), "sparse_products")
Start with  `sparse_products` with a mask technique, such as static or rigl. Set `tokens` to about the number of tokens
            of a micro-batch.
Cost        Compilation, and seconds of measurement per layer shape on a new machine. 24 bytes per unmasked weight,
            unless masks consist of blocks.
Avoid       Runs without masks or at high densities, because dense matmuls are then chosen. Machines without a C++
            compiler, because torch's sparse kernels are slower.
Does not    Save memory (weights, gradients and moments stay dense tensors), or speed up evaluation or layers that
            adapters or float8 change.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.dtensors import is_dtensor
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive, check_pattern, set_pattern
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.sparse.block_sparse_matrix import BlockSparseMatrix, kept_blocks
from thrifty.kernels.sparse.csr_matrix import LANES, CsrMatrix
from thrifty.kernels.sparse.sparse_breakeven import BreakevenCase, DensityTimeFit, Form, best_form, forms_of
from thrifty.kernels.sparse.sparse_linear import sparse_linear
from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern
from thrifty.machine.cpu_features import has_fast_bfloat16
from thrifty.modeling.module_surgery import weight_layers, wrap_forward
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import masks_in

WORTH = 0.9
"""Maximum time of sparse matmuls, relative to dense matmuls, at which sparse matmuls are chosen."""
UNMASKED = "dense: its weight has no mask"
Lines = dict[torch.dtype, dict[Form, DensityTimeFit]]
"""Fitted times of matmuls as functions of density, by dtype and form (CSR or blocks)."""


class LayerProducts:
    """Choice between sparse and dense products for a layer with a masked weight."""

    def __init__(self, lines: Lines):
        self.lines = lines
        self.patterns: dict[torch.dtype, SparsityPattern] = {}
        """Sparsity pattern by dtype, for each dtype in which sparse products are chosen."""
        self.is_sparse = False
        """True if sparse products are chosen for any dtype."""
        self.used = False
        """True if the last forward pass used sparse products."""
        self.summary = UNMASKED
        self.dense_gradient = False
        self._known: tuple[Tensor, int] | None = None

    def follow(self, mask: Tensor | None, weight: Tensor) -> None:
        """Choose sparse or dense matmuls again if the mask has changed. A weight with nonzero values outside its mask
        stays dense."""
        if mask is None or is_dtensor(mask) or mask.device != weight.device:
            self.patterns, self._known = {}, None
            self.summary = UNMASKED if mask is None else "dense: its mask is divided among ranks, or on another device"
        elif self._known is None or self._known[0] is not mask or self._known[1] != mask._version:
            self.patterns, self._known = {}, None
            if bool(weight.detach().masked_fill(mask, 0).any()):
                self.summary = "dense: its weight is nonzero outside the mask"
            else:
                self._known = mask, mask._version
                self._choose(mask)
        self.is_sparse = bool(self.patterns)

    def _choose(self, mask: Tensor) -> None:
        densities: dict[Form, float] = {"csr": float(mask.sum()) / mask.numel()}
        if "blocks" in forms_of(*mask.shape):
            densities["blocks"] = float(kept_blocks(mask, LANES).float().mean())
        patterns: dict[Form, SparsityPattern] = {}
        summaries: dict[str, str] = {}
        for dtype, lines in self.lines.items():
            form, ratio = best_form(lines, densities)
            if ratio <= WORTH:
                patterns[form] = patterns.get(form) or (
                    CsrMatrix.of(mask) if form == "csr" else BlockSparseMatrix.of(mask)
                )
                self.patterns[dtype] = patterns[form]
            summaries.setdefault(format_products(form, densities["csr"], ratio), str(dtype).removeprefix("torch."))
        self.summary = "; ".join(
            f"{text} in {dtype}" if len(summaries) > 1 else text for text, dtype in summaries.items()
        )


def format_products(form: Form, density: float, ratio: float) -> str:
    """Return the matmuls that a layer uses, and the reason, as text."""
    if ratio <= WORTH:
        return f"{form}: at density {density:.3g} sparse products take {ratio:.2f} of the time of dense products"
    return f"dense: at density {density:.3g} sparse products would take {ratio:.2f} of the time"


SPARSE_PRODUCT: ModuleNote[LayerProducts] = ModuleNote("sparse_product")


def use_sparse_product(layer: nn.Linear, lines: Lines) -> None:
    """Make a linear layer use sparse matmuls in training mode, once `SPARSE_PRODUCT.of(layer)` has chosen them."""
    SPARSE_PRODUCT.set(layer, LayerProducts(lines))
    wrap_forward(layer, _multiply)


def remove_sparse_product(layer: nn.Linear) -> None:
    """Undo `use_sparse_product`."""
    SPARSE_PRODUCT.remove(layer)
    del layer.forward


def _multiply(layer: Any, inner: Any, x: Tensor) -> Tensor:
    # torch.compile guards only on this condition
    return _sparse(layer, inner, x) if layer.training and SPARSE_PRODUCT.of(layer).is_sparse else inner(x)


@torch.compiler.disable(reason="its structure changes with the masks")
def _sparse(layer: Any, inner: Any, x: Tensor) -> Tensor:
    device, product = x.device.type, SPARSE_PRODUCT.of(layer)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else layer.weight.dtype
    product.used = dtype in product.patterns
    if not product.used:
        return inner(x)
    return sparse_linear(x, layer.weight, layer.bias, product.patterns[dtype], product.dense_gradient)


def products_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the layers that may use sparse matmuls, by name. `SPARSE_PRODUCT.of(layer).summary` is the choice of a
    layer."""
    return SPARSE_PRODUCT.noted(model)


class SparseProductCounter:
    """A backward pass that records the number of layers with sparse products."""

    def __init__(self, inner: Backward):
        self.inner = inner

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        products = [SPARSE_PRODUCT.of(layer) for _, layer in products_of(model)]
        for product in products:
            product.used = False
        outcome = self.inner(model, objective, batch)
        sparse = sum(product.used for product in products)
        return replace(outcome, notes={**outcome.notes, "sparse_products": float(sparse)})


class SparseProducts(Technique):
    """The forward pass and the input's gradient use SpMM. The weight's gradient uses SDDMM. In bfloat16, dense matmuls
    are faster, but sparse matmuls still compute in float32. The crossover density is therefore lower than in float32.
    If masks change, the sparse structure of each weight is rebuilt.

    A step that changes masks computes the dense gradient, because growth requires it. In all other steps the recorded
    gradient norm and the noise scale use the gradients of unmasked weights. Weights divided among ranks use dense
    matmuls, and so do all weights in a run with delayed updates. `explain` counts masked matmuls as dense, because
    masks are known only when the run starts. Measured times are stored in the cache folder. A run that resumes without
    these times, or on another machine, may choose other matmuls and round differently. On a GPU blocks are multiplied
    in Triton, which has run only in its interpreter (unverified on a GPU).
    """

    stage, numerics, tolerance = Stage.COMPILE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.LINEAR_PRODUCTS})

    where: str = r"\.\d+\."
    """Regular expression that is searched in layer names to choose layers that may use sparse matmuls; by default
    layers in numbered blocks."""
    tokens: Positive = 2048
    """Number of rows in the measured matmuls, about the number of tokens of a micro-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self, self.name, "where")

    def model(self, model: nn.Module) -> nn.Module:
        named = weight_layers(model)
        layers = {name: layer for name, layer in named.items() if re.search(self.where, name)}
        if not layers:
            raise RefusedError(
                f"no layer has a name that matches {self.where!r}",
                fix=set_pattern(self.name, [*named]),
            )
        reasons = {name: reason for name, layer in layers.items() if (reason := _reason_to_skip(layer))}
        shapes: dict[tuple[int, ...], list[str]] = {}
        for name, layer in layers.items():
            if name in reasons:
                add_note(f"skipped {name}: {reasons[name]}")
                continue
            use_sparse_product(layer, self.lines(layer.weight))  # type: ignore[arg-type]
            shapes.setdefault(tuple(layer.weight.shape), []).append(name)  # type: ignore[union-attr]
        for shape, names in shapes.items():
            add_note(self._crossovers(shape, names, layers[names[0]]))
        return model

    def lines(self, weight: Tensor) -> Lines:
        """Return the fitted times of a layer's matmuls as functions of density, for each possible dtype."""
        device, fits = weight.device.type, {}
        for dtype in dict.fromkeys((weight.dtype, torch.bfloat16, torch.float16)):
            if dtype is not weight.dtype and not has_fast_bfloat16():
                continue
            name = str(torch.bfloat16 if dtype is torch.float16 else dtype).removeprefix("torch.")
            cases = [BreakevenCase(form, *weight.shape, self.tokens, name, device) for form in forms_of(*weight.shape)]
            fits[dtype] = {case.form: case.measured() for case in cases}
        return fits

    def _crossovers(self, shape: tuple[int, ...], names: list[str], layer: Any) -> str:
        lines = SPARSE_PRODUCT.of(layer).lines[layer.weight.dtype]
        when = ", ".join(f"{form} below a density of {line.crossover:.2f}" for form, line in lines.items())
        subject = f"{len(names)} layers of {shape[0]} x {shape[1]}, such as {names[0]}"
        return f"{subject}, are faster as {when}; sparse products are chosen up to {WORTH:g} of the dense time"

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        """Update the layers after a change of their masks. The model's structure does not change."""
        if state.model is not None and state.optimizer is not None:
            self.follow_masks(state)
        return None

    def follow_masks(self, state: TrainState) -> None:
        """Choose the matmuls of each layer by the current mask of its weight."""
        masks = {} if state.optimizer.site.behind else masks_in(state)
        by_parameter = dict(zip(map(id, state.optimizer.parameters), state.optimizer.names, strict=True))
        moving = bool(masks) and state.optimizer.will_move_masks()
        for _, layer in products_of(state.model):
            SPARSE_PRODUCT.of(layer).follow(masks.get(by_parameter.get(id(layer.weight), "")), layer.weight)
            SPARSE_PRODUCT.of(layer).dense_gradient = moving

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward", "changes"})

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, TransformOptimizer):
            raise UsageError(
                f"{self.name} uses the masks of an optimizer, and {type(optimizer).__name__!r} has none",
                fix="use an optimizer of thrifty.optim, such as thrifty.optim.AdamW(model, lr=1e-3)",
            )

        def follow(model: nn.Module, args: object) -> None:
            if model.training and hasattr(optimizer, "site"):
                self.follow_masks(TrainState(model=model, optimizer=optimizer))

        model.register_forward_pre_hook(follow)

    def backward(self, backward: Backward) -> Backward:
        return SparseProductCounter(backward)

    def finish(self, model: nn.Module) -> nn.Module:
        for _, layer in products_of(model):
            remove_sparse_product(layer)
        return model


def _reason_to_skip(layer: nn.Module) -> str | None:
    if isinstance(layer, NonDynamicallyQuantizableLinear | nn.MultiheadAttention):
        return "its attention reads the weights directly"
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return f"a {type(layer).__name__} does not compute x Wᵀ + b"
    if "forward" in vars(layer):
        return "another technique changes its product"
    if is_dtensor(layer.weight):
        return "its weight is divided among ranks"
    return None
