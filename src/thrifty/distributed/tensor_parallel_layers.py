"""Layers divided over the ranks of a tensor-parallel axis: weights are DTensors, activations are plain tensors.

    hidden states, whole or divided along tokens → column layers, each rank with its part of every slice →
    operations in between → row layers, whose results are summed → hidden states

DTensor does all conversions and their gradients, as in torch's ColwiseParallel and RowwiseParallel. In addition, layers
may be fused (several slices) or transposed. The column layers of a module share one all-reduce of the gradients at
their common input.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.shard_layout import FusedOrder, record_orders
from thrifty.core.state import full_value
from thrifty.distributed.tensor_parallel_rng import ParallelRandomRegion, parallel_randomness
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.module_surgery import wrap_forward

WHOLE, LAST, TOKENS = Replicate(), Shard(-1), Shard(1)


@dataclass
class TensorParallelizer:
    """The division of one model over a mesh. Closing `undo` restores the undivided model."""

    mesh: DeviceMesh
    """Mesh with a single axis."""
    stream: Placement
    """Placement of hidden states between modules: replicated, or divided along tokens."""
    summed: set[str] = field(default_factory=set)
    """Names of undivided parameters whose gradients are summed over ranks."""
    undo: ExitStack = field(default_factory=ExitStack)
    _divided: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Mapping from undivided to divided parameters; `swap_parameters` puts the divided parameters into the model."""

    def column(self, layer: nn.Module, slices: Sequence[int] = (), region: ParallelRandomRegion | None = None) -> None:
        """Divide a layer by outputs. If the layer fuses several layers, `slices` are their widths, and each rank has a
        part of each of them. An embedding table is divided by columns."""
        out = 1 if is_transposed(layer) or isinstance(layer, nn.Embedding) else 0
        self._divide(layer, {"weight": out, "bias": 0}, slices)
        self._before(layer, lambda x: self._as_dtensor(x, WHOLE))

        def local(result: DTensor) -> Tensor:
            if region is not None and layer.training:
                region.enter()
            return result.to_local()

        self._after(layer, local)

    def row(self, layer: nn.Module, region: ParallelRandomRegion | None = None) -> None:
        """Divide a layer by inputs: each rank receives a part of the inputs. The bias is added once, to the sum."""
        self._divide(layer, {"weight": 0 if is_transposed(layer) else 1, "bias": None})

        def as_parts(x: Tensor) -> DTensor:
            if region is not None:
                region.leave()
            return self._as_dtensor(x, LAST)

        self._before(layer, as_parts)
        self._after(layer, lambda result: self._redistributed(result, LAST, self.stream))

    def vocabulary(self, layer: nn.Module) -> None:
        """Divide an embedding table or head by vocabulary: each rank has a part of the rows. The layer's output is
        undivided."""
        self._divide(layer, {"weight": 0, "bias": 0})
        self._before(layer, lambda x: self._as_dtensor(x, WHOLE))
        self._after(layer, lambda result: self._redistributed(result, LAST, WHOLE))

    def gather_input(self, module: nn.Module) -> None:
        """Gather hidden states at a module's input, so that a single all-reduce sums their gradients."""
        self._before(module, lambda x: self._as_dtensor(x, self.stream).redistribute(placements=[WHOLE]))

    def end_region_after(self, module: nn.Module, region: ParallelRandomRegion) -> None:
        """End a region of random numbers after the module's forward pass, unless a row layer has ended the region."""

        def forward(_: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                region.leave()

        self._wrap(module, forward)

    def count(self, module: nn.Module, attribute: str, whole: int) -> None:
        """Set a count attribute of a module, such as its number of heads, to the count on this rank."""
        self.undo.callback(setattr, module, attribute, whole)
        setattr(module, attribute, whole // self.mesh.size())

    def along_tokens(self, blocks: Sequence[nn.Module], draws: bool) -> None:
        """Divide hidden states along tokens from the first block to the last. With `draws`, each rank has its own
        random numbers inside the blocks."""
        for index, block in enumerate(blocks):
            first, last = index == 0, index == len(blocks) - 1
            self._wrap(block, partial(self._block, first=first, last=last, draws=draws))

    def _block(
        self,
        block: nn.Module,
        inner: Callable,
        x: Tensor,
        *args: Any,
        first: bool,
        last: bool,
        draws: bool,
        **kwargs: Any,
    ) -> Any:
        if first:
            if x.shape[1] % self.mesh.size():
                raise UsageError(
                    f"{x.shape[1]} tokens cannot be divided equally among {self.mesh.size()} ranks",
                    fix=f"use texts of a multiple of {self.mesh.size()} tokens; or set sequence_parallel = false",
                )
            x = self._redistributed(x, WHOLE, TOKENS)
        with parallel_randomness(self.mesh.get_local_rank()) if draws and block.training else nullcontext():
            result = inner(x, *args, **kwargs)
        if not last:
            return result
        if isinstance(result, tuple):
            return self._redistributed(result[0], TOKENS, WHOLE), *result[1:]
        return self._redistributed(result, TOKENS, WHOLE)

    def _as_dtensor(self, tensor: Tensor, have: Placement) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [have], run_check=False)

    def _redistributed(self, tensor: Tensor, have: Placement, want: Placement) -> Tensor:
        return self._as_dtensor(tensor, have).redistribute(placements=[want]).to_local()

    def _divide(self, layer: nn.Module, dims: Mapping[str, int | None], slices: Sequence[int] = ()) -> None:
        """Divide a layer's parameters along `dims`. Nothing is sampled or sent, because every rank has the whole
        parameter and keeps a part.
        """
        orders = {}
        for name, dim in dims.items():
            whole = getattr(layer, name, None)
            if whole is None:
                continue
            value, placement = whole.detach(), WHOLE if dim is None else Shard(dim)
            if dim is not None and len(slices) > 1:
                orders[name] = FusedOrder(dim, tuple(slices), self.mesh.size())
                value = orders[name].to_stored(value)
            if whole not in self._divided:
                divided = distribute_tensor(value, self.mesh, [placement], src_data_rank=None)
                self._divided[whole] = nn.Parameter(divided, whole.requires_grad)
            elif self._divided[whole].placements != (placement,):
                raise RefusedError(
                    "two layers that share a weight are split differently", fix="untie them, or set plan"
                )
        layer.orders = orders
        self.undo.callback(delattr, layer, "orders")

    def swap_parameters(self, model: nn.Module) -> None:
        """Replace undivided parameters by divided parameters in every module that uses them."""
        _replace(model, self._divided)
        record_orders(model)
        self._divided.clear()
        self.undo.callback(_replace_by_whole, model)

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            first = next(iter(kwargs))
            return args, kwargs | {first: change(kwargs[first])}

        self.undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _after(self, module: nn.Module, change: Callable[[Any], Tensor]) -> None:
        """Change the output of a module before other hooks see it."""
        self.undo.callback(module.register_forward_hook(lambda _, args, output: change(output), prepend=True).remove)

    def _wrap(self, module: nn.Module, forward: Callable) -> None:
        before = vars(module).get("forward")
        wrap_forward(module, forward)
        self.undo.callback(
            partial(setattr, module, "forward", before) if before else partial(delattr, module, "forward")
        )


def _replace(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in others:
                module._parameters[name] = others[parameter]


def _replace_by_whole(model: nn.Module) -> None:
    divided = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    _replace(model, {parameter: nn.Parameter(full_value(parameter), parameter.requires_grad) for parameter in divided})
