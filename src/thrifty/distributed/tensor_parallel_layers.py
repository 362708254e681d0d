"""Layers divided over the ranks of an axis that compute a model together: weights are DTensors, what passes between
modules are plain tensors.

    hidden states, whole or divided along tokens → column layers, each rank its own part of every slice → whatever comes
    between → row layers, whose results are summed → hidden states again

The conversions and their gradients are DTensor's, as in torch's ColwiseParallel and RowwiseParallel. Beyond those, this
knows of layers that hold several slices and of transposed ones, and the column layers of a module share one sum of the
gradients at their input.
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
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.modeling.residual_branches import is_transposed

WHOLE, LAST, TOKENS = Replicate(), Shard(-1), Shard(1)


@dataclass
class TensorParallelizer:
    """What is done to one model, and how to undo it."""

    mesh: DeviceMesh
    """Of one axis."""
    stream: Placement
    """How hidden states lie between modules: whole, or divided along tokens."""
    summed: set[str] = field(default_factory=set)
    """Whole parameters whose gradient is the sum over ranks, by name."""
    undo: ExitStack = field(default_factory=ExitStack)
    _divided: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """What takes the place of each whole parameter, until it does."""

    def column(self, layer: nn.Module, slices: Sequence[int] = (), region: ParallelRandomRegion | None = None) -> None:
        """Each rank has its part of every slice of the outputs; of a table, of the columns."""
        out = 1 if is_transposed(layer) or isinstance(layer, nn.Embedding) else 0
        self._divide(layer, {"weight": out, "bias": 0}, slices)
        self._before(layer, lambda x: self._given(x, WHOLE))

        def local(result: DTensor) -> Tensor:
            if region is not None and layer.training:
                region.enter()
            return result.to_local()

        self._behind(layer, local)

    def row(self, layer: nn.Module, region: ParallelRandomRegion | None = None) -> None:
        """Each rank takes its part of the inputs; the bias is added once, to the sum."""
        self._divide(layer, {"weight": 0 if is_transposed(layer) else 1, "bias": None})

        def given(x: Tensor) -> DTensor:
            if region is not None:
                region.leave()
            return self._given(x, LAST)

        self._before(layer, given)
        self._behind(layer, lambda result: self._turn(result, LAST, self.stream))

    def vocabulary(self, layer: nn.Module) -> None:
        """Each rank has the rows of a table or a head for its part of the vocabulary; what the layer gives is whole."""
        self._divide(layer, {"weight": 0, "bias": 0})
        self._before(layer, lambda x: self._given(x, WHOLE))
        self._behind(layer, lambda result: self._turn(result, LAST, WHOLE))

    def entrance(self, module: nn.Module) -> None:
        """Hidden states become whole where a module takes them, and the gradients there are summed once."""
        self._before(module, lambda x: self._given(x, self.stream).redistribute(placements=[WHOLE]))

    def closing(self, module: nn.Module, region: ParallelRandomRegion) -> None:
        """A region ends with the module's forward pass, if a row layer has not ended it."""

        def forward(_: nn.Module, inner: Callable, *args: Any, **kwargs: Any) -> Any:
            try:
                return inner(*args, **kwargs)
            finally:
                region.leave()

        self._wrap(module, forward)

    def count(self, module: nn.Module, attribute: str, whole: int) -> None:
        """Lets a module know how many of something its rank has."""
        self.undo.callback(setattr, module, attribute, whole)
        setattr(module, attribute, whole // self.mesh.size())

    def along_tokens(self, blocks: Sequence[nn.Module], draws: bool) -> None:
        """Hidden states are divided along tokens from the first block to the last; where blocks draw random numbers,
        each rank draws its own."""
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
                    fix=f"take texts of a multiple of {self.mesh.size()} tokens, or set sequence_parallel = false",
                )
            x = self._turn(x, WHOLE, TOKENS)
        with parallel_randomness(self.mesh.get_local_rank()) if draws and block.training else nullcontext():
            result = inner(x, *args, **kwargs)
        if not last:
            return result
        if isinstance(result, tuple):
            return self._turn(result[0], TOKENS, WHOLE), *result[1:]
        return self._turn(result, TOKENS, WHOLE)

    def _given(self, tensor: Tensor, have: Placement) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [have], run_check=False)

    def _turn(self, tensor: Tensor, have: Placement, want: Placement) -> Tensor:
        """A tensor of one placement as a local one of another."""
        return self._given(tensor, have).redistribute(placements=[want]).to_local()

    def _divide(self, layer: nn.Module, dims: Mapping[str, int | None], slices: Sequence[int] = ()) -> None:
        """Divides a layer's parameters along these dims. Every rank has the whole and takes its part: nothing is drawn
        and nothing is sent."""
        orders = {}
        for name, dim in dims.items():
            whole = getattr(layer, name, None)
            if whole is None:
                continue
            kept, placement = whole.detach(), WHOLE if dim is None else Shard(dim)
            if dim is not None and len(slices) > 1:
                orders[name] = FusedOrder(dim, tuple(slices), self.mesh.size())
                kept = orders[name].kept(kept)
            if whole not in self._divided:
                parted = distribute_tensor(kept, self.mesh, [placement], src_data_rank=None)
                self._divided[whole] = nn.Parameter(parted, whole.requires_grad)
            elif self._divided[whole].placements != (placement,):
                raise RefusedError(
                    "two layers that share a weight are split differently", fix="untie them, or give a plan"
                )
        layer.orders = orders
        self.undo.callback(delattr, layer, "orders")

    def exchange(self, model: nn.Module) -> None:
        """Puts the divided parameters in the place of whole ones, wherever those are used."""
        _replace(model, self._divided)
        record_orders(model)
        self._divided.clear()
        self.undo.callback(_unite, model)

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Changes the first input, which may be given by name."""

        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            first = next(iter(kwargs))
            return args, kwargs | {first: change(kwargs[first])}

        self.undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _behind(self, module: nn.Module, change: Callable[[Any], Tensor]) -> None:
        """Changes the output, before whatever else acts on it."""
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


def _unite(model: nn.Module) -> None:
    divided = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    _replace(model, {parameter: nn.Parameter(full_value(parameter), parameter.requires_grad) for parameter in divided})
