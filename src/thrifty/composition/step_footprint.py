"""Memory and work of one step: a forward pass, a backward pass and the update."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import OutOfMemoryError, Size, Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.fake_branches import causal_masks_of_plain_rows
from thrifty.core.footprint import Footprint
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.run_notes import add_note
from thrifty.core.tensor_tracing import StepTrace, gc_disabled, tensor_bytes
from thrifty.core.written_buffers import BufferSnapshot
from thrifty.modeling.module_surgery import find_stacks, first_of
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.optim.chunked_update import ChunkedUpdate, UpdateChunk, UpdateExecutor
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.update_plan import PartitionedUpdate, TwoPartUpdate


class CountedPasses:
    """Traced forward and backward pass of a model on a batch, fake or real. Different updates may follow the same
    passes, because the passes do not depend on the update. `built` is a trace that was open while the model was built;
    it includes tensors that are neither parameters nor buffers. If memory runs out, the passes are counted up to this
    point."""

    def __init__(
        self, model: nn.Module, objective: Objective, backward: Backward, batch: Batch, built: StepTrace | None = None
    ):
        model.train()
        self.model, self.live = model, built or StepTrace()
        self.blocks = blocks_of(model)
        inputs = [*batch.fields.values(), batch.weight]
        with gc_disabled(), self.live as live:
            live.know(*model.parameters(), *model.buffers(), *inputs)
            self.buffer_values = BufferSnapshot(model)  # stored by the training loop too, to undo a skipped step
            large = self.buffer_values.large  # constant buffers are freed after the first step
            self.buffers, before = live.held_besides([*model.parameters(), *inputs]) - large, live.now - large
            live.peak = before
            marking, passes = _ForwardPeakObjective(objective, live), _BlockPasses(model, self.blocks, live)
            with passes, causal_masks_of_plain_rows():
                try:
                    outcome: BackwardResult = backward(model, marking, batch)
                    del outcome
                except (MemoryError, OutOfMemoryError):
                    add_note(f"counted up to {live.peak / 1e6:,.0f} MB only: no more memory is free here")
            self.flops, self.hidden = live.flops, passes.hidden
            self.activations = (live.peak if marking.after_forward < 0 else marking.after_forward) - before
            self.saved = min(max(passes.saved, 0), self.activations)
            self.peak, self.left = live.peak - before, live.now - before
            """Peak bytes above the bytes before the passes; bytes that remain after the passes, usually gradients."""
            self.most, self.inside = max(passes.peak - before, 0), max(passes.peak_inside - before, 0)
            """Peak without complete gradients: over all passes, and after the first gradient of a block is complete."""

    def followed_by(self, transform: GradientTransform, steps: int, skips_missing: bool = False) -> Footprint:
        """Return the footprint of a whole step with this update, in a run of `steps` steps.

        `skips_missing` is True if the update skips parameters without a gradient, as torch's optimizers do.

        Activations are the bytes alive at the end of the first micro-batch's forward pass. Temporary bytes are the rest
        of the peak above activations or gradients. FLOPs count matrix products and attention in forward and backward
        pass; `update_flops` counts those of the mean update. If the run has several kinds of update, the largest counts
        for memory. An update that reads values is counted up to the read.
        """
        model, live = self.model, self.live
        with gc_disabled(), live:
            existing = live.storages()
            named = [pair for pair in model.named_parameters() if pair[1].grad is not None or not skips_missing]
            optimizer = TransformOptimizer(named, transform)
            slots = [tensor for tensors in optimizer.slots.values() for tensor in tensors]
            buffers = self.buffers + live.held_besides(slots, existing)
            keep_distinct_chunks(optimizer.site.tail, optimizer.parameters, live)
            live.peak, before = live.now, live.now - self.left
            kinds, update_flops = distinct_updates(optimizer, steps), 0.0
            for optimizer.updates, share in kinds.items():
                flops = live.flops
                with suppress(DataDependentOutputException, DynamicOutputShapeException):
                    optimizer.step()
                update_flops += share * (live.flops - flops)
            peak = max(self.peak, live.peak - before)
        gradients = sum(tensor_bytes(parameter) for parameter in optimizer.parameters)
        parameters = sum(map(tensor_bytes, model.parameters()))
        sizes = block_bytes(self.blocks)
        return Footprint(
            parameters=parameters,
            outside=parameters - sum(sizes),
            block=max(sizes, default=0),
            vectors=sum(tensor_bytes(p) for name, p in model.named_parameters() if not is_matrix(name, p)),
            hidden=self.hidden,
            buffers=buffers,
            gradients=gradients,
            optimizer=sum(map(tensor_bytes, slots)),
            activations=self.activations,
            saved=self.saved,
            passes=self.most,
            inside=self.inside,
            temporary=max(peak - max(self.activations, gradients), 0),
            flops=self.flops,
            update_flops=update_flops,
        )


def distinct_updates(optimizer: TransformOptimizer, steps: int, limit: int = 1000) -> dict[int, float]:
    """Return one step number for each kind of update among the first `limit` steps, with the share of the kind. Two
    updates are of one kind if the same scalars are 0 in both."""
    kinds: dict[tuple[bool, ...], list[int]] = {}
    numbers = range(min(steps, limit))
    for step in numbers:
        kind = tuple(bool(number) for number in optimizer.transform.scalars(step, step).values())
        kinds.setdefault(kind, []).append(step)
    return {alike[0]: len(alike) / len(numbers) for alike in kinds.values()}


def keep_distinct_chunks(tail: UpdateExecutor, parameters: Sequence[Tensor], live: StepTrace) -> None:
    """Keep only one chunk of each group of equal chunks in an update. Its FLOPs count for the group. Chunks run one
    after another, so equal chunks do not raise the peak. An update of billions of parameters has many chunks."""
    if isinstance(tail, TwoPartUpdate):
        keep_distinct_chunks(tail.first, parameters, live)
        keep_distinct_chunks(tail.then, parameters, live)
    elif isinstance(tail, PartitionedUpdate):
        for own, member in tail.tails:
            keep_distinct_chunks(member, [parameters[i] for i in own], live)
    elif isinstance(tail, ChunkedUpdate):
        alike = Counter(_likeness(piece, parameters) for piece in tail.pieces)
        distinct = {_likeness(piece, parameters): piece for piece in tail.pieces}
        tail.pieces = [
            replace(piece, work=_RepeatedWork(piece.work, live, alike[kind])) for kind, piece in distinct.items()
        ]


@dataclass(frozen=True)
class _RepeatedWork:
    """Work on one chunk whose FLOPs count for `times` equal chunks."""

    inner: UpdateExecutor
    live: StepTrace
    times: int

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        before = self.live.flops
        self.inner.apply(updates, slots, parameters, numbers)
        self.live.flops += (self.times - 1) * (self.live.flops - before)


def _likeness(piece: UpdateChunk, parameters: Sequence[Tensor]) -> tuple[tuple[Size, int | None], ...]:
    return tuple((parameters[i].shape, rows and rows.stop - rows.start) for i, rows in piece.spans)


class _ForwardPeakObjective(WrappedObjective):
    """Wrapper of an objective that records the bytes alive at the end of the forward pass."""

    def __init__(self, inner: Objective, live: StepTrace):
        super().__init__(inner)
        self.live, self.after_forward = live, -1

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        if self.after_forward < 0:  # at later micro-batches, gradients of earlier ones are alive too
            self.after_forward = self.live.now
        return losses


class _BlockPasses:
    """Hooks that record the bytes of hidden states and of saved tensors of blocks, and memory peaks without complete
    gradients."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], live: StepTrace):
        self.blocks, self.live = blocks, live
        self.hidden = self.saved = 0
        """Maximum bytes passed from a block to the next; bytes that all blocks save in their first forward pass."""
        self.peak = self.peak_inside = 0
        """Peak over all passes; peak after the first gradient of a block is complete."""
        self._learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._of_blocks = {parameter for block in blocks for parameter in block.parameters()}
        self._complete: set[nn.Parameter] = set()
        self._begun: set[nn.Module] = set()
        self._ended: set[nn.Module] = set()
        self._gradient_bytes, self._is_inside = 0, False

    def __enter__(self) -> Self:
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._completed) for parameter in self._learned]
        self._hooks += [block.register_forward_pre_hook(self._begins) for block in self.blocks]
        self._hooks += [block.register_forward_hook(self._ends) for block in self.blocks]
        self.live.watch = self._see
        return self

    def __exit__(self, *error: Any) -> None:
        self.live.watch = None
        for hook in self._hooks:
            hook.remove()

    def _see(self, now: int) -> None:
        self.peak = max(self.peak, now - self._gradient_bytes)
        if self._is_inside:
            self.peak_inside = max(self.peak_inside, now - self._gradient_bytes)

    def _completed(self, parameter: nn.Parameter) -> None:
        self._is_inside |= parameter in self._of_blocks
        if parameter not in self._complete and parameter.grad is not None:
            self._complete.add(parameter)
            self._gradient_bytes += tensor_bytes(parameter.grad)

    def _begins(self, block: nn.Module, args: tuple) -> None:
        self._is_inside = False
        if block not in self._begun:
            self._begun.add(block)
            self.saved -= self.live.now

    def _ends(self, block: nn.Module, args: tuple, output: Any) -> None:
        self.hidden = max(self.hidden, tensor_bytes(first_of(output)))
        if block not in self._ended:
            self._ended.add(block)
            self.saved += self.live.now


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all stacks; [] for a model without blocks."""
    with suppress(RefusedError):
        return [block for stack in find_stacks(model).values() for block in stack]
    return []


def block_bytes(blocks: Sequence[nn.Module]) -> list[int]:
    """Return the bytes of each block's parameters. Shared parameters count for the first block."""
    seen: set[nn.Parameter] = set()
    sizes = []
    for block in blocks:
        own = set(block.parameters()) - seen
        sizes.append(sum(map(tensor_bytes, own)))
        seen |= own
    return sizes
