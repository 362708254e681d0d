"""Float8 (Micikevicius et al. 2022): compute linear layers in 8 bits, E4M3 forward and E5M2 backward.

Paper       Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433). Delayed scales follow
            Transformer Engine.
Promise     Matmuls run on the FP8 units of a GPU. Saved inputs of linear layers take one byte per element.
Use         model, optimizer = thrifty.apply((model, optimizer), "float8", scaling="delayed")
Start with  `float8` together with precision.mixed and `compile`. If values are clipped, set `margin=1` or
            `scaling=current`.
Cost        Two more passes over each matmul operand. Without FP8 units matmuls are emulated, which is many times slower
            than bfloat16.
Avoid       Devices without FP8 units, except to study 8-bit training. Narrow layers, because they gain no time.
Does not    Quantize embeddings, norms, softmax, biases or the head, change the format of parameters and gradients, or
            use FP8 in evaluation; by default, the first and the last block of a stack keep their precision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.ranks import ranks
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Positive, SettingBound
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.kernels.float8 import FORMATS, MULTIPLE, has_units
from thrifty.kernels.float8_linear import CastRule, DelayedScaling, float8_linear, next_scales
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.module_surgery import find_stacks, is_under, select, weight_layers, wrap_forward

CASTING: ModuleNote[CastRule] = ModuleNote("float8_casting")
FORMER_FORWARD: ModuleNote[Callable[..., Any] | None] = ModuleNote("float8_former_forward")
BUFFERS = ("float8_history", "float8_scales", "float8_seen")


def use_float8(layer: nn.Module, casting: CastRule, history: int = 0) -> None:
    """Make a linear layer (or `Conv1D`) compute its matmuls in 8 bits in training mode.

    With a `history`, scales are delayed, and the training loop must call `roll` after each step.
    """
    CASTING.set(layer, casting)
    FORMER_FORWARD.set(layer, vars(layer).get("forward"))
    if history:
        zeros = layer.weight.new_zeros(3, history, dtype=torch.float32)
        layer.register_buffer("float8_history", zeros)
        layer.register_buffer("float8_scales", zeros[:, 0].clone())
        layer.register_buffer("float8_seen", zeros[:, 0].clone(), persistent=False)
    wrap_forward(layer, _multiply)


def remove_float8(layer: nn.Module) -> None:
    """Undo `use_float8`."""
    CASTING.remove(layer)
    if (former := FORMER_FORWARD.remove(layer)) is None:
        del layer.forward
    else:
        layer.forward = former
    for name in BUFFERS:
        if hasattr(layer, name):
            delattr(layer, name)


def _multiply(layer: nn.Module, inner: Any, x: Tensor) -> Tensor:
    if not layer.training:
        return inner(x)
    weight = layer.weight.T if is_transposed(layer) else layer.weight
    delayed = DelayedScaling(layer.float8_scales, layer.float8_seen) if hasattr(layer, "float8_seen") else None
    return float8_linear(x, weight, layer.bias, CASTING.of(layer), delayed)


@torch.no_grad()
def roll(layers: Sequence[nn.Module], most_recent: bool = False, growth: float = 1.0) -> None:
    """Update the histories and scales of layers after a step, from the magnitudes that layers recorded on all ranks.

    `growth` is the factor by which a changed loss scale multiplies the gradients of the next step.
    """
    seen = torch.stack([layer.float8_seen for layer in layers])
    seen = torch.where(seen.isfinite(), seen, 0.0)  # NaN has no maximum over ranks
    if ranks() > 1 and not isinstance(seen, FakeTensor):
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    histories, scales = ([getattr(layer, name) for layer in layers] for name in BUFFERS[:2])
    factors = torch.tensor([1.0, 1.0, growth], device=seen.device)
    after = next_scales(
        torch.stack(histories) * factors[:, None],
        torch.stack(scales),
        seen * factors,
        CASTING.of(layers[0]),
        most_recent,
    )
    for buffers, values in zip((histories, scales), after, strict=True):
        torch._foreach_copy_(buffers, list(values))


def rolled(backward: Backward, most_recent: bool = False) -> Backward:
    """Return a backward pass over all micro-batches and ranks that afterwards updates the 8-bit scales."""

    def whole_step(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        layers = [module for module in model.modules() if hasattr(module, "float8_seen")]
        for layer in layers:
            layer.float8_seen.zero_()
        outcome = backward(model, objective, batch)
        roll(layers, most_recent, outcome.scale_growth)
        return outcome

    return whole_step


class Float8(Technique):
    # it changes the matmul of a linear layer, and so comes before adapters, which add to the layer's output
    """A delayed scale is computed from the largest magnitudes of the last `history` steps on all ranks. A value above
    the recent maximum is therefore clipped, and `margin` adds headroom. With `scaling=current`, and in layers without a
    history, the scale is computed from the tensor itself. E4M3 spans 18 powers of two, and E5M2 spans 32."""

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.LINEAR_PRODUCTS})

    scaling: Literal["delayed", "current"] = "delayed"
    """Source of scales: earlier steps ("delayed"), or the tensor itself ("current")."""
    granularity: Literal["tensor", "row"] = "tensor"
    """Scope of a scale: a tensor, or each row of each matmul operand. "row" requires current scaling."""
    history: Positive = 1024
    """Number of past steps whose maximum magnitude determines a delayed scale."""
    most_recent: bool = False
    """True to determine a delayed scale from the last step only."""
    margin: Annotated[int, SettingBound(least=0, most=8)] = 0
    """Headroom above the maximum magnitude, in powers of two."""
    powers_of_two: bool = False
    """True to round scales down to powers of two. Scaling is then exact."""
    gradients: Literal["e5m2", "e4m3"] = "e5m2"
    where: str = ""
    """Regular expression that is searched in layer names to choose the quantized linear layers; empty for all."""
    skip_end_blocks: bool = True
    """True to skip the first and the last block of each stack of three or more blocks."""

    @property
    def is_low_precision(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.granularity == "row" and self.scaling == "delayed":
            raise UsageError(
                f"{self.name}: granularity 'row' has no history, since rows differ in each step",
                fix=f"--set techniques.{self.name}.scaling=current; or --set techniques.{self.name}.granularity=tensor",
            )

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"backward"})

    def model(self, model: nn.Module) -> nn.Module:
        casting = CastRule(
            rows=self.granularity == "row",
            margin=self.margin,
            powers_of_two=self.powers_of_two,
            gradients=FORMATS[self.gradients],
            emulated=not has_units(next(model.parameters()).device),
        )
        for layer in self.layers(model).values():
            use_float8(layer, casting, self.history if self.scaling == "delayed" else 0)
        add_note(
            "products are emulated, since the device has no float8 units"
            if casting.emulated
            else "products on float8 units"
        )
        return model

    def layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """Return the quantized layers by name. Raise RefusedError if there are none."""
        blocks = _blocks(model)
        kinds = {type(layer) for layer in weight_layers(model).values() if is_transposed(layer)}

        def skip(name: str, layer: nn.Module) -> str | None:
            block = next((block for block in blocks if is_under(name, block)), None)
            if block is None:
                return "it is outside the blocks"
            if self.skip_end_blocks and blocks[block]:
                return f"{block} is skipped as {blocks[block]}"
            return _reason_to_skip(layer)

        return select(model, (nn.Linear, *kinds), self.where, skip).matched

    def backward(self, backward: Backward) -> Backward:
        return rolled(backward, self.most_recent) if self.scaling == "delayed" else backward

    def hook_steps(self, model: nn.Module, optimizer: Optimizer) -> None:
        layers = [module for module in model.modules() if hasattr(module, "float8_seen")]

        def follow(*_: object) -> None:
            roll(layers, self.most_recent, 1.0)
            for layer in layers:
                layer.float8_seen.zero_()

        if layers:
            optimizer.register_step_post_hook(follow)

    def finish(self, model: nn.Module) -> nn.Module:
        for _, module in CASTING.noted(model):
            remove_float8(module)
        return model


def _blocks(model: nn.Module) -> Mapping[str, str]:
    """Return the position of each block by name: "the first block", "the last block" or "".

    Only stacks of three or more blocks have a first and a last block.
    """
    endings: dict[str, str] = {}
    for stack, blocks in find_stacks(model).items():
        last = len(blocks) - 1
        ends = {0: "the first block", last: "the last block"} if last > 1 else {}
        prefix = f"{stack}." if stack else ""
        endings |= {f"{prefix}{index}": ends.get(index, "") for index in range(len(blocks))}
    return endings


def _reason_to_skip(layer: nn.Module) -> str | None:
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its attention reads the weight directly"
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        return f"the product of a {type(layer).__name__} is unknown"
    rows, columns = layer.weight.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"its widths {rows} and {columns} are not both multiples of {MULTIPLE}"
    return None
