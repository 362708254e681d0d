"""Partition of a model for pipeline stages: modules before the blocks, blocks, modules after the blocks, and costs of
each.

The partition is derived from one forward pass. It works for any model that calls one list of blocks in order.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from thrifty.core.errors import RefusedError, UsageError, class_name
from thrifty.core.tensor_tracing import StepTrace
from thrifty.modeling.embeddings import find_head
from thrifty.modeling.module_surgery import find_stacks, is_under

LONGEST = 1024
"""Maximum number of tokens in the forward pass; fewer if the model has fewer positions."""
PASSES = 6
"""Number of timed forward passes; the first is not counted."""


@dataclass(frozen=True)
class ModelPartition:
    """The parts of a model in the order of the forward pass, with their costs."""

    stack: str
    """Name of the list of blocks."""
    front: tuple[str, ...]
    """Names of modules with their own parameters that run before the first block, for example an embedding."""
    back: tuple[str, ...]
    """Names of modules with their own parameters that run after the last block, including the head."""
    costs: tuple[float, ...]
    """Cost of the modules before the blocks, of each block, and of the modules after the blocks: seconds if timed, else
    FLOPs.
    """


def partition_model(model: nn.Module, timed: bool) -> ModelPartition:
    """Divide a model into the parts of a pipeline, and return them with their costs. The model's input is tokens, or
    the result of the model's method `example`. With fake tensors, FLOPs are counted instead of times. Raise
    RefusedError if a parameter belongs to no part, or if the blocks are not a single list that is called in order."""
    stacks = find_stacks(model)
    if len(stacks) > 1:
        raise RefusedError(
            f"the model has {len(stacks)} stacks of blocks, {' and '.join(stacks)}",
            fix="--without parallelism.pipeline",
        )
    ((stack, blocks),) = stacks.items()
    outside = {
        name: module
        for name, module in model.named_modules()
        if not is_under(name, stack) and any(True for _ in module.parameters(recurse=False))
    }
    if around := [name for name in outside if is_under(stack, name)]:
        parameters = ", ".join(name for name, _ in model.get_submodule(around[0]).named_parameters(recurse=False))
        raise RefusedError(
            f"{parameters} of {around[0] or 'the model'} belongs to all blocks",
            fix="leave out the technique that adds it",
        )
    watch = _LayerTimer(model, blocks, outside)
    if timed and not is_fake(next(model.parameters())):
        passes = [watch.costs(_Clock(watch.device)) for _ in range(PASSES)][1:]
        costs = _with_equal_block_costs([min(each) for each in zip(*passes, strict=True)], blocks)
    else:
        with StepTrace() as trace:
            costs = watch.costs(lambda: float(trace.flops))
    back = watch.after | (outside.keys() - watch.before)
    return ModelPartition(
        stack, tuple(n for n in outside if n not in back), tuple(n for n in outside if n in back), tuple(costs)
    )


def balanced_partition(costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of blocks of each stage (at least one) so that the slowest stage costs least. Among equal
    solutions, the most even distribution is returned. `costs` are `ModelPartition.costs`: modules before the blocks
    (first stage), each block, and modules after the blocks (last stage). Raise RefusedError if there are fewer blocks
    than stages."""
    front, *blocks, back = costs
    if len(blocks) < stages:
        raise RefusedError(
            f"{len(blocks)} blocks cannot fill {stages} stages", fix="use fewer stages, or set chunks = 1"
        )
    sums = [0.0, *accumulate(blocks)]
    # best[n]: for the first n blocks in the stages so far, the cost of the slowest, the sum of squares, the counts
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        is_last = stage == stages - 1
        ends = [len(blocks)] if is_last else range(stage + 1, len(blocks) - (stages - stage - 1) + 1)
        extended = {}
        for end in ends:
            candidates = []
            for start, (slowest, squares, counts) in best.items():
                if start < end:
                    cost = sums[end] - sums[start] + front * (stage == 0) + back * is_last
                    candidates.append((max(slowest, cost), squares + cost**2, [*counts, end - start]))
            extended[end] = min(candidates)
        best = extended
    return best[len(blocks)][2]


class _Clock:
    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _LayerTimer:
    """Recorder of the order and times of modules in forward passes."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, outside: dict[str, nn.Module]):
        self.model, self.blocks, self.outside = model, blocks, outside
        self.device, self.length = next(model.parameters()).device, _length(model)
        self.before: set[str] = set()
        self.after: set[str] = set()
        self.calls: list[tuple[int, float, float]] = []
        """Block index, start time and end time of each call."""

    def costs(self, now: Callable[[], float]) -> list[float]:
        was_training = self.model.training
        try:
            with self._hooks(now), torch.no_grad():
                began, output = self._forward(now)
                self._head(output)
                ended = now()
        finally:
            self.model.train(was_training)
        if [index for index, _, _ in self.calls] != list(range(len(self.blocks))):
            raise RefusedError(
                "the model does not call its blocks once each and in order", fix="--without parallelism.pipeline"
            )
        if both := self.before & self.after:
            raise RefusedError(f"{min(both)} runs before and after the blocks", fix="--without parallelism.pipeline")
        return [self.calls[0][1] - began, *[end - begin for _, begin, end in self.calls], ended - self.calls[-1][2]]

    def _forward(self, now: Callable[[], float]) -> tuple[float, Any]:
        """Return the start time of a forward pass, and its output."""
        self.model.eval()
        while True:
            self.calls.clear()
            began = now()
            try:
                return began, self.model(self._inputs())
            except RefusedError:
                raise
            except UsageError:  # longer than the model was built for
                if self.length == 1:
                    raise
                self.length //= 2
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise RefusedError(
                    f"{class_name(self.model)} cannot be called with tokens alone: {error}",
                    fix="--without parallelism.pipeline",
                ) from error

    def _inputs(self) -> Tensor:
        if (example := getattr(self.model, "example", None)) is not None:
            return example(self.device)
        return torch.zeros(1, self.length, dtype=torch.int64, device=self.device)

    def _head(self, output: Any) -> None:
        """Call the head if only the loss calls it. Raise RefusedError for any other module that has not run."""
        left = [name for name in self.outside if name not in self.before | self.after]
        head = find_head(self.model)
        if other := [name for name in left if head is None or self.outside[name] is not head[1]]:
            raise RefusedError(f"{other[0]} does not run in a forward pass", fix="leave out the technique that adds it")
        if left and head is not None:
            head[1](output)

    @contextmanager
    def _hooks(self, now: Callable[[], float]) -> Iterator[None]:
        def note(name: str) -> Callable[..., None]:
            return lambda *_: (self.after if self.calls else self.before).add(name)

        def begin(index: int) -> Callable[..., None]:
            return lambda *_: self.calls.append((index, now(), 0.0))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise RefusedError(
                    f"a block returns a {type(output).__name__}, not hidden states alone",
                    fix="--without parallelism.pipeline",
                )
            index, began, _ = self.calls.pop()
            self.calls.append((index, began, now()))

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in self.outside.items()]
        for index, block in enumerate(self.blocks):
            hooks += [block.register_forward_pre_hook(begin(index)), block.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _length(model: nn.Module) -> int:
    """Return the number of tokens for the forward pass: the model's number of positions, at most LONGEST."""
    tables = [m for name, m in model.named_modules() if any(word in name.lower() for word in ("pos", "wpe"))]
    lengths = [table.num_embeddings - 2 for table in tables if isinstance(getattr(table, "num_embeddings", None), int)]
    most = max(min([*lengths, LONGEST]), 1)  # some count positions from 2
    return 1 << (most.bit_length() - 1)


def _with_equal_block_costs(costs: list[float], blocks: nn.ModuleList) -> list[float]:
    """Return costs in which equal blocks have the same cost, the median of their measurements."""
    kinds = [(type(block), *(p.shape for p in block.parameters())) for block in blocks]
    front, *own, back = costs
    return [
        front,
        *(statistics.median(c for c, k in zip(own, kinds, strict=True) if k == kind) for kind in kinds),
        back,
    ]
