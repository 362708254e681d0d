"""A model in order: what runs in front of its blocks, the blocks, what runs behind them; and what each of these costs.

Found by watching one forward pass, so that it holds for any model whose blocks are one list called in order.
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

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.modeling.embeddings import find_head
from thrifty.modeling.module_surgery import find_stacks, is_under

LONGEST = 1024
"""Tokens of the forward pass that is watched, where positions do not allow fewer only."""
PASSES = 6
"""Forward passes that are timed; the first does not count."""


@dataclass(frozen=True)
class ModelPartition:
    stack: str
    """The list of blocks, by name."""
    front: tuple[str, ...]
    """Modules with parameters of their own that run before the first block, by name; an embedding, for instance."""
    back: tuple[str, ...]
    """Those behind the last block, head included."""
    costs: tuple[float, ...]
    """Of the front, each block, and the back: seconds, or FLOPs where they were counted."""


def partition_model(model: nn.Module, timed: bool) -> ModelPartition:
    """The parts of a model of tokens, or of one whose `example` says what it takes. Fake tensors are counted, never
    timed. Raises RefusedError where one of its parameters belongs to no part, or its blocks are not one list called in
    order."""
    stacks = find_stacks(model)
    if len(stacks) > 1:
        raise RefusedError(
            f"there are {len(stacks)} stacks of blocks, {' and '.join(stacks)}", fix="take a model with one"
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
            f"{parameters} of {around[0] or 'the model'} belongs to all blocks", fix="leave out what adds it"
        )
    watch = _LayerTimer(model, blocks, outside)
    if timed and not is_fake(next(model.parameters())):
        passes = [watch.costs(_Clock(watch.device)) for _ in range(PASSES)][1:]
        costs = _alike([min(each) for each in zip(*passes, strict=True)], blocks)
    else:
        with StepTrace() as trace:
            costs = watch.costs(lambda: float(trace.flops))
    back = watch.behind | (outside.keys() - watch.before)
    return ModelPartition(
        stack, tuple(n for n in outside if n not in back), tuple(n for n in outside if n in back), tuple(costs)
    )


def balanced_partition(costs: Sequence[float], stages: int) -> list[int]:
    """How many blocks each stage takes, at least one, so that the slowest stage is as fast as can be, and then all as
    equal as can be; `costs` are those of the front, which the first stage has, each block, and the back, of the last.
    Raises RefusedError where there are fewer blocks than stages."""
    front, *blocks, back = costs
    if len(blocks) < stages:
        raise RefusedError(f"{len(blocks)} blocks do not make {stages} stages", fix="take fewer stages, or chunks = 1")
    sums = [0.0, *accumulate(blocks)]
    # best[n]: of the first n blocks in the stages so far, the slowest stage, the sum of squares, and the counts
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        is_last = stage == stages - 1
        ends = [len(blocks)] if is_last else range(stage + 1, len(blocks) - (stages - stage - 1) + 1)
        longer = {}
        for end in ends:
            ways = []
            for start, (slowest, squares, counts) in best.items():
                if start < end:
                    cost = sums[end] - sums[start] + front * (stage == 0) + back * is_last
                    ways.append((max(slowest, cost), squares + cost**2, [*counts, end - start]))
            longer[end] = min(ways)
        best = longer
    return best[len(blocks)][2]


class _Clock:
    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _LayerTimer:
    """Forward passes of a model with an eye on what runs when."""

    def __init__(self, model: nn.Module, blocks: nn.ModuleList, outside: dict[str, nn.Module]):
        self.model, self.blocks, self.outside = model, blocks, outside
        self.device, self.length = next(model.parameters()).device, _length(model)
        self.before: set[str] = set()
        self.behind: set[str] = set()
        self.calls: list[tuple[int, float, float]] = []
        """Of each block: which, when it began and ended."""

    def costs(self, now: Callable[[], float]) -> list[float]:
        was_training = self.model.training
        try:
            with self._hooks(now), torch.no_grad():
                began, output = self._forward(now)
                self._head(output)
                ended = now()
        finally:
            self.model.train(was_training)
        if [place for place, _, _ in self.calls] != list(range(len(self.blocks))):
            raise RefusedError("its blocks are not called once each and in order", fix="take another model")
        if both := self.before & self.behind:
            raise RefusedError(f"{min(both)} runs before and behind the blocks", fix="take another model")
        return [self.calls[0][1] - began, *[end - begin for _, begin, end in self.calls], ended - self.calls[-1][2]]

    def _forward(self, now: Callable[[], float]) -> tuple[float, Any]:
        """When a forward pass began, and its output."""
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
                    f"{type(self.model).__name__} does not take tokens alone: {error}", fix="take a language model"
                ) from error

    def _inputs(self) -> Tensor:
        if (example := getattr(self.model, "example", None)) is not None:
            return example(self.device)
        return torch.zeros(1, self.length, dtype=torch.int64, device=self.device)

    def _head(self, output: Any) -> None:
        """The head, where the forward pass leaves it to the loss; raises RefusedError for what else has not run."""
        left = [name for name in self.outside if name not in self.before | self.behind]
        head = find_head(self.model)
        if other := [name for name in left if head is None or self.outside[name] is not head[1]]:
            raise RefusedError(f"{other[0]} does not run in a forward pass", fix="leave out what adds it")
        if left and head is not None:
            head[1](output)

    @contextmanager
    def _hooks(self, now: Callable[[], float]) -> Iterator[None]:
        def note(name: str) -> Callable[..., None]:
            return lambda *_: (self.behind if self.calls else self.before).add(name)

        def begin(place: int) -> Callable[..., None]:
            return lambda *_: self.calls.append((place, now(), 0.0))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise RefusedError(
                    f"a block gives a {type(output).__name__}, not hidden states alone", fix="take another model"
                )
            place, began, _ = self.calls.pop()
            self.calls.append((place, began, now()))

        hooks = [module.register_forward_pre_hook(note(name)) for name, module in self.outside.items()]
        for place, block in enumerate(self.blocks):
            hooks += [block.register_forward_pre_hook(begin(place)), block.register_forward_hook(end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _length(model: nn.Module) -> int:
    """As many tokens as a model surely has positions for, up to LONGEST."""
    tables = [m for name, m in model.named_modules() if any(word in name.lower() for word in ("pos", "wpe"))]
    lengths = [table.num_embeddings - 2 for table in tables if isinstance(getattr(table, "num_embeddings", None), int)]
    most = max(min([*lengths, LONGEST]), 1)  # some count positions from 2
    return 1 << (most.bit_length() - 1)


def _alike(costs: list[float], blocks: nn.ModuleList) -> list[float]:
    """The same cost for all blocks that are alike: the median of what they took."""
    kinds = [(type(block), *(p.shape for p in block.parameters())) for block in blocks]
    front, *own, back = costs
    return [
        front,
        *(statistics.median(c for c, k in zip(own, kinds, strict=True) if k == kind) for kind in kinds),
        back,
    ]
