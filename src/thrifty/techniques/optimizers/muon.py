"""Muon (Jordan et al. 2024): orthogonalize the momentum of hidden matrices and update the rest by AdamW.

Paper       Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon). The update size is from Liu et al. 2025, Muon
            is Scalable for LLM Training (arXiv 2502.16982).
Promise     One moment per hidden matrix; Liu et al. claim half of AdamW's compute for equal loss. Equal to
            torch.optim.Muon within bfloat16 rounding.
Use         optimizer = thrifty.optim.Muon(model, lr=2e-3)
Start with  `muon:lr=2e-3`; the best rate is often two to four times AdamW's. For `scale=original`, `lr` is about 20
            times larger.
Cost        15 bfloat16 matmuls per hidden matrix and step. These matmuls take 20 r² c + 10 r³ FLOPs for the smaller dim
            r and the larger dim c.
Avoid       Small batches, because Muon's matmuls then dominate the step. Models that consist mostly of embeddings.
Does not    Orthogonalize embeddings, the output head, vectors or convolutions; AdamW updates these parameters.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.dtensors import is_dtensor
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Betas, Epsilon, Positive, Probability, Rate, SettingBound
from thrifty.core.shard_layout import order_of
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.machine.cpu_features import has_fast_bfloat16
from thrifty.modeling.attention_parts import mark_interleaved
from thrifty.modeling.embeddings import output_layers
from thrifty.modeling.expert_stacks import is_expert_stack, is_transposed_stack, stacked_matrices
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.parameter_kinds import (
    FusedSlices,
    fused_slices,
    is_hidden_matrix,
    is_kept_transposed,
    mark_end,
    mark_stack,
    set_transposed,
)
from thrifty.optim.parameter_partition import partition
from thrifty.optim.transform_elements import (
    AddDecayedWeights,
    ScaleByAdam,
    ScaleByMomentum,
    full_values,
    match_layout,
    scale_by_learning_rate,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic polynomial, which is steep at 0. Five iterations map singular values above 0.002
times the matrix norm to values between 0.68 and 1.21. The iterations do not converge to 1."""

HALVED = 256
"""Minimum number of rows of x at which, on a CPU, two matmuls that skip a quarter of x @ xᵀ are faster than one matmul.
"""

Scale = Literal["original", "match_rms"]
TOGETHER = 2**24
"""Number of elements of the matrices that are orthogonalized together. It limits temporary memory."""
ORIGINAL = 20
"""Typical ratio of Muon's learning rate with the scale "original" to AdamW's."""


def orthogonalized(matrix: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-7) -> Tensor:
    """Return approximately the nearest orthogonal matrix to each matrix (…, rows, columns).

    The result is U S Vᵀ with the U and V of the singular value decomposition and S near 1. It is computed by
    Newton-Schulz iteration in `dtype`.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = symmetric_product(x)
        x = _plus_product(x, a, symmetric_product(gram, gram, b, c), x, 1.0)
    return x.mT if tall else x


def symmetric_product(x: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Return x @ xᵀ, or beta · added + alpha · x @ xᵀ for a symmetric `added`.

    On a CPU a quarter of a large product is copied from the symmetric quarter instead of computed.
    """

    def product(rows: slice, columns: slice) -> Tensor:
        left, right = x[..., rows, :], x[..., columns, :].mT
        if added is None:
            return _with_fast_products(torch.matmul, left, right)
        return _plus_product(added[..., rows, columns], beta, left, right, alpha)

    size = x.shape[-2]
    first, second, both = slice(size // 2), slice(size // 2, None), slice(None)
    if size < HALVED or x.device.type != "cpu":
        return product(both, both)
    result = x.new_empty(*x.shape[:-1], size)
    result[..., first, :] = product(first, both)
    result[..., second, second] = product(second, second)
    result[..., second, first] = result[..., first, second].mT
    return result


def _plus_product(added: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float) -> Tensor:
    product = torch.addmm if left.ndim == 2 else torch.baddbmm
    return _with_fast_products(product, added, left, right, beta=beta, alpha=alpha)


def _with_fast_products(product: Callable[..., Tensor], *operands: Tensor, **factors: float) -> Tensor:
    """Return a matrix product, rounded once to the operands' dtype.

    CPUs without bfloat16 units compute in float32, because bfloat16 matmuls are 4 to 60 times slower there.
    """
    device, dtype = operands[0].device.type, operands[0].dtype
    if dtype is not torch.bfloat16 or device != "cpu" or has_fast_bfloat16("cpu"):
        return product(*operands, **factors)
    return product(*(each.float() for each in operands), **factors).to(dtype)


def step_size(outputs: int, inputs: int, scale: Scale) -> float:
    """Return the factor of an orthogonal update.

    "original" is sqrt(outputs / inputs), at least 1 (Jordan). "match_rms" scales updates to a root mean square of 0.2,
    which is usual for AdamW (Liu et al.).
    """
    return max(1.0, outputs / inputs) ** 0.5 if scale == "original" else 0.2 * max(outputs, inputs) ** 0.5


class ScaleByOrthogonalization(GradientTransform):
    """Replace each matrix update by `step_size` · `orthogonalized`. Updates of the same shape are stacked."""

    name = "orthogonalize"
    reach = TransformScope.TENSOR

    def __init__(
        self, steps: int = 5, scale: Scale = "match_rms", slices: bool = False, dtype: torch.dtype = torch.bfloat16
    ):
        self.steps, self.scale, self.slices, self.dtype = steps, scale, slices, dtype
        self.cuts: list[FusedSlices | None] = []
        self.transposed: list[bool] = []

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        self.cuts = fused_slices(names, parameters) if self.slices else [None] * len(names)
        self.transposed = [is_kept_transposed(parameter) for parameter in parameters]
        return {}

    def subset(self, indices: Sequence[int]) -> GradientTransform:
        some = copy(self)
        some.cuts = [self.cuts[i] for i in indices]
        some.transposed = [self.transposed[i] for i in indices]
        return some

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        everything = list(range(len(updates)))
        # sharded matrices are gathered one by one, because all at once would be the whole model
        sharded = any(is_dtensor(update) for update in updates)
        for group in [[i] for i in everything] if sharded else [everything]:
            matrices = {i: full_values(updates[i], order_of(parameters[i])) for i in group}
            for side in (False, True):
                group_matrices = [(i, matrix) for i, matrix in matrices.items() if self.transposed[i] is side]
                self._orthogonalize([layer for i, matrix in group_matrices for layer in self._layers(i, matrix)], side)
            for i, matrix in matrices.items():
                if matrix is not updates[i]:
                    updates[i].copy_(match_layout(matrix, updates[i], order_of(parameters[i])))
        return updates

    def _layers(self, index: int, matrix: Tensor) -> Sequence[Tensor]:
        cut = self.cuts[index]
        return cut.of(matrix) if cut else matrix.unbind() if matrix.ndim == 3 else [matrix]

    def _orthogonalize(self, layers: Sequence[Tensor], transposed: bool) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for layer in layers:
            by_shape.setdefault(layer.shape, []).append(layer)
        for (rows, columns), alike in by_shape.items():
            count = max(1, TOGETHER // max(1, rows * columns))
            for group in (alike[start : start + count] for start in range(0, len(alike), count)):
                stack = torch.stack(group) if len(group) > 1 else group[0]
                orthogonal = orthogonalized(stack, self.steps, self.dtype).view(-1, rows, columns)
                for layer, new in zip(group, orthogonal, strict=True):
                    layer.copy_(new).mul_(step_size(*((columns, rows) if transposed else (rows, columns)), self.scale))


def muon(
    lr: float = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    scale: Scale = "match_rms",
    steps: int = 5,
    slices: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    adamw_lr: float | None = None,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
) -> GradientTransform:
    """Return Muon for hidden matrices (`modeling/parameter_kinds.py`), and AdamW for all other parameters.

    Muon: parameter -= lr · (orthogonal update + weight_decay · parameter). AdamW uses the learning rate `adamw_lr`, by
    default `lr` on AdamW's scale, and the same weight decay as Muon.
    """
    adamw_lr = (lr if scale == "match_rms" else lr / ORIGINAL) if adamw_lr is None else adamw_lr
    hidden = chain(
        ScaleByMomentum(momentum, nesterov),
        ScaleByOrthogonalization(steps, scale, slices, dtype),
        AddDecayedWeights(weight_decay),
        scale_by_learning_rate(lr),
    )
    rest = chain(
        ScaleByAdam(*adamw_betas, adamw_eps), AddDecayedWeights(weight_decay), scale_by_learning_rate(adamw_lr)
    )
    return partition(("hidden", is_hidden_matrix, hidden), ("rest", lambda name, parameter: True, rest))


class Muon(Technique):
    """Wen et al. 2025, Fantastic Pretraining Optimizers (arXiv 2509.02046), tuned all optimizers. They found Muon and
    SOAP faster than AdamW: 1.4 times at 0.1B parameters, 1.1 times at 1.2B.

    A fused matrix of queries, keys and values counts as one matrix unless `slices = true`; experts in one parameter
    count as one matrix each. Sharded parameters are gathered one by one, and each rank orthogonalizes all matrices. In
    a model, embeddings, output heads and experts are detected by structure. Without a model, embeddings and heads are
    detected by the usual names of such parameters. `thrifty.summary(optimizer)` lists the parameters that Muon updates
    and the parameters that AdamW updates.
    """

    stage, numerics = Stage.PRECONDITION, Numerics.DIFFERENT
    claims = frozenset({Claim.OPTIMIZER})
    needs_names = True

    lr: Rate = 1e-3
    momentum: Probability = 0.95
    nesterov: bool = True
    weight_decay: Rate = 0.1
    scale: Scale = "match_rms"
    """Size of an orthogonal update. "match_rms" scales updates to AdamW's size, so that AdamW's learning rates apply.
    "original" is Jordan's size, which requires learning rates about 20 times larger."""
    newton_schulz_steps: Positive = 5
    """Number of Newton-Schulz iterations."""
    slices: bool = False
    """True to orthogonalize each slice of a fused matrix separately (queries, keys, values; gate, value)."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the Newton-Schulz iterations."""
    adamw_lr: Annotated[float | None, SettingBound(least=0)] = None
    """AdamW's learning rate, for all parameters except hidden matrices. The default is `lr`; with `scale = "original"`
    it is `lr` / 20."""
    adamw_betas: Betas = (0.9, 0.95)
    adamw_eps: Epsilon = 1e-8

    def model(self, model: nn.Module) -> nn.Module:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        for layer in (*tables, *output_layers(model).values()):
            for parameter in layer.parameters():
                mark_end(parameter)
        for layer in filter(is_transposed, model.modules()):
            set_transposed(layer.weight)
        for experts in filter(is_expert_stack, model.modules()):
            for stack in stacked_matrices(experts):
                mark_stack(stack)
                if is_transposed_stack(experts):
                    set_transposed(stack)
        if self.slices:
            mark_interleaved(model)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        hidden = [name for name, p in model.named_parameters() if p.requires_grad and is_hidden_matrix(name, p)]
        add_note(f"{len(hidden)} hidden matrices; {len(names) - len(hidden)} other parameters by AdamW")
        return model

    def update(self, transform: GradientTransform) -> GradientTransform:
        hidden = self.lr, self.momentum, self.nesterov, self.weight_decay, self.scale, self.newton_schulz_steps
        rest = self.adamw_lr, self.adamw_betas, self.adamw_eps
        return chain(muon(*hidden, self.slices, getattr(torch, self.precision), *rest), transform)
