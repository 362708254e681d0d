"""The workload of any model, traced on fake tensors. Each kind of block is traced once.

A model is any module with its blocks in a `nn.ModuleList`. Tracing allocates no memory and computes no values. Tracing
a model of 10^12 parameters takes about a second."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core.errors import RefusedError, class_name
from thrifty.core.fake_branches import causal_masks_of_plain_rows
from thrifty.modeling.module_surgery import change_first, find_stacks, first_of, wrap_forward
from thrifty.simulators.cluster.gpu_op_forms import use_gpu_ops
from thrifty.simulators.cluster.sharded_op_trace import OperationTracer
from thrifty.simulators.cluster.workload import DividedAmount, Workload, WorkloadPart

Loss = Callable[[nn.Module, Tensor], Tensor]
"""Function from a model and tokens (1, t) to the loss."""


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of `model.logits(tokens)`, or of `model(tokens)` if the model has no such method.

    For an encoder-decoder, source and target have the same length.
    """
    inputs = (tokens, tokens) if getattr(model, "task", "") == "sequence_to_sequence" else (tokens,)
    output = getattr(model, "logits", model)(*inputs)
    return cross_entropy(getattr(output, "logits", output), tokens)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of logits (1, t, v) on tokens (1, t), in float32."""
    return F.cross_entropy(logits.flatten(0, -2).float(), tokens.flatten())


def trace_workload(
    name: str,
    build: Callable[[], nn.Module],
    length: int,
    *,
    loss: Loss = next_token_loss,
    flash: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Workload:
    """Return the workload of the model that `build` returns, on examples of `length` tokens.

    With `flash`, attention saves no scores. Blocks with the same class and the same shapes of parameters and inputs are
    traced once. Raises RefusedError if the model has no list of blocks, does not call its blocks, or reads values of
    tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), _default(dtype), torch.random.fork_rng(devices=[]):
        try:
            model = build().train()
            _as_fake(model, dtype)
            tokens = torch.zeros(1, length, dtype=torch.long)
            with causal_masks_of_plain_rows():
                return _BlockTracing(model, flash).workload(name, lambda: loss(model, tokens), length, dtype.itemsize)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise RefusedError(
                f"the model {name!r} reads values of tensors, but a simulation has only shapes: {error}",
                fix="simulate a model whose operations do not depend on values, such as a model of dense layers",
            ) from error


@dataclass
class _BlockTracing:
    """Tracer of a forward pass that traces the first block of each kind and skips all other blocks.

    A skipped block returns its input. Everything outside of blocks is the embedding or the head.
    """

    model: nn.Module
    flash: bool
    trace: OperationTracer = field(init=False)
    blocks: list[WorkloadPart] = field(default_factory=list)
    known: dict[Any, tuple[WorkloadPart, Any]] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)
    cut: tuple[Tensor, Tensor] | None = None
    """Output of the embedding, and the detached input of the first block."""

    def __post_init__(self) -> None:
        self.trace = OperationTracer(self.model.parameters(), self.model.buffers())
        for stack_name, stack in find_stacks(self.model).items():
            for block in stack:
                wrap_forward(block, partial(self._run, stack_name))

    def workload(self, name: str, loss: Callable[[], Tensor], length: int, itemsize: int) -> Workload:
        trace = self.trace
        with self._watching():
            trace.section = "embedding forward"
            result = loss()
            trace.section = ""
            if self.cut is None:
                raise RefusedError(
                    f"the forward pass of {class_name(self.model)} calls none of its blocks one by one",
                    fix="call each block of the nn.ModuleList in forward",
                )
            hidden, entry = self.cut
            outside = [p for p in self.model.parameters() if id(p) not in self.counted]
            entry_gradient = self._backward("head backward", result, [entry, *outside], torch.ones_like(result))
            if hidden.requires_grad:
                # there is no gradient if another stack used the first stack's output: its blocks return other tensors
                gradient = torch.empty_like(hidden) if entry_gradient is None else entry_gradient
                self._backward("embedding backward", hidden, outside, gradient)
        shared, embedding, head = self._outside(outside)
        size = float(entry.numel() * entry.element_size())
        return Workload(
            name,
            tuple(self.blocks),
            self._part("embedding", embedding, entry=8.0 * length, is_block=False),
            self._part("head", head, entry=size, is_block=False),
            length,
            itemsize,
            shared,
        )

    def _run(self, stack: str, block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args:  # some models pass all arguments by name, with hidden states first
            name, *_ = kwargs
            args = (kwargs.pop(name),)
        hidden, *others = args
        if self.cut is None:
            # start a new graph, so that the head's backward pass ends at the first block
            self.trace.sum_output(hidden)
            self.cut = hidden, hidden.detach().requires_grad_()
            self.trace.section, hidden = "head forward", self.cut[1]
        kind = (stack, type(block), *map(_likeness, tree_leaves((tuple(block.parameters()), args, kwargs))))
        if kind not in self.known:
            self.known[kind] = self._trace_block(inner, block, (hidden, *others), kwargs)
        part, result = self.known[kind]
        parameters = list(block.parameters())
        is_repeat = bool(parameters) and all(id(p) in self.counted for p in parameters)
        self.counted |= {id(p) for p in parameters}
        self.blocks.append(replace(part, parameters=DividedAmount()) if is_repeat else part)
        return change_first(result, lambda first: hidden)

    def _trace_block(
        self, inner: Callable[..., Any], block: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[WorkloadPart, Any]:
        trace, around = self.trace, self.trace.section
        name = f"block {len(self.known)}"
        trace.section = ""
        args, kwargs = tree_map(_leaf, (args, kwargs))
        trace.add_inputs([value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)])
        trace.section = f"{name} forward"
        result = inner(*args, **kwargs)
        out = first_of(result)
        inputs = [value for value in tree_leaves((args, kwargs, tuple(block.parameters()))) if _requires_grad(value)]
        self._backward(f"{name} backward", out, inputs, torch.empty_like(out))
        trace.section = around
        entry = float(args[0].numel() * args[0].element_size())
        parameters = sum((_division(p) for p in block.parameters()), DividedAmount())
        return self._part(name, parameters, entry), result

    def _backward(self, section: str, result: Tensor, inputs: list[Tensor], gradient: Tensor | None) -> Tensor | None:
        self.trace.section = ""
        if gradient is not None:
            self.trace.add_inputs([gradient])
        self.trace.section = section
        gradients = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
        self.trace.section = ""
        return gradients[0]

    def _part(self, name: str, parameters: DividedAmount, entry: float, is_block: bool = True) -> WorkloadPart:
        forward, backward, trace = f"{name} forward", f"{name} backward", self.trace
        return WorkloadPart(
            name,
            parameters,
            trace.work(forward),
            trace.work(backward),
            saved=trace.saved(forward),
            entry=entry,
            for_weights=trace.for_weights(backward),
            core=trace.work(forward, only_core=True),
            core_saved=trace.saved(forward, only_core=True),
            is_block=is_block,
        )

    def _outside(self, parameters: list[Tensor]) -> tuple[float, DividedAmount, DividedAmount]:
        """Return the number of shared parameters, and the parameters of the embedding and of the head."""
        shared, embedding, head = 0.0, DividedAmount(), DividedAmount()
        for parameter in parameters:
            readers = self.trace.weights_read.get(parameter.untyped_storage()._cdata, set())
            first = "embedding forward" in readers
            embedding += _division(parameter) if first else DividedAmount()
            head += DividedAmount() if first else _division(parameter)
            shared += parameter.numel() if first and "head forward" in readers else 0.0
        return shared, embedding, head

    @contextmanager
    def _watching(self) -> Iterator[None]:
        hooks = torch.autograd.graph.saved_tensors_hooks(self.trace.save, lambda tensor: tensor)
        with use_gpu_ops(self.flash), self.trace, hooks:
            yield


def _division(parameter: Tensor) -> DividedAmount:
    """Return the number of parameters. Matrices are split; biases and scales are small and stay whole."""
    return DividedAmount(split=parameter.numel()) if parameter.ndim > 1 else DividedAmount(whole=parameter.numel())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_fake(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters by fake parameters in the run's number format, because `build` may have loaded real
    parameters.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (parameter.dtype != dtype or not hasattr(parameter, "fake_mode")):
                shape = tuple(parameter.shape)
                fake = nn.Parameter(torch.empty(shape, dtype=dtype))
                module._parameters[name] = fakes.setdefault(id(parameter), fake)
