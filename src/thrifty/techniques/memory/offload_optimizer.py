"""Optimizer offloading (Ren et al. 2021): keep optimizer state and run updates in host memory or on disk.

Paper       Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840), including the delayed update.
Promise     The optimizer state takes no device memory. On a CPU the state is in a memory-mapped file, whose pages the
            system can drop from memory.
Use         model, optimizer = thrifty.apply((model, optimizer), "offload_optimizer", total_steps=10_000)
Start with  `offload_optimizer:delay=false`. With `delay=true`, lower the learning rate.
Cost        Every step sends gradients to the host and new weights back. The update runs at the CPU's speed.
Avoid       Optimizer state that fits in device memory. On a GPU, optimizers that compute matmuls, such as muon and
            soap.
Does not    Change any value unless `delay=true`; updates on the CPU may differ from GPU updates in the last bit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from thrifty.core.dtensors import is_dtensor
from thrifty.core.errors import RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.gradient_transform import (
    Content,
    GradientTransform,
    Scalars,
    Slots,
    TransformChain,
    TransformScope,
    chain,
    changes_updates,
)
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.memory.host_tier import HostTier, OffloadHandle, StorageTier, Where, tier_for
from thrifty.memory.storage_tier import on_part
from thrifty.modeling.parameter_kinds import stand_in_for
from thrifty.optim.torch_optimizer import UpdateLocation
from thrifty.optim.update_plan import update_tail

NEXT = "next"
TILE = 4 * 1024 * 1024
"""Approximate number of elements per tile. New values of a tile are sent while the next tile is computed."""


def tiles(sizes: Sequence[int], elements: int) -> list[list[int]]:
    """Return groups of neighboring indices whose `sizes` sum to at least `elements`. The last group may be smaller."""
    groups: list[list[int]] = [[]]
    for index, _ in enumerate(sizes):
        if sum(sizes[i] for i in groups[-1]) >= elements:
            groups.append([])
        groups[-1].append(index)
    return groups


class TierStateUpdate(UpdateLocation):
    """An in-place update of parameters whose optimizer state is on a tier (host memory or disk)."""

    def __init__(self, transform: TransformChain, names: Sequence[str], parameters: list[Tensor], tier: StorageTier):
        super().__init__(transform, names, parameters)
        tensors_on_device = [tensor for tensors in self.state.values() for tensor in tensors]
        offloaded = map(stand_in_for, tensors_on_device, tier.allocate(tensors_on_device))
        self.state = {slot: [next(offloaded) for _ in tensors] for slot, tensors in self.state.items()}


class HostCopyUpdate(UpdateLocation):
    """An update of host copies of the parameters, whose new values are then copied to the device.

    Stateless transforms that require all gradients together, such as clipping, run on the device before the update.
    """

    def __init__(self, transform: TransformChain, names: Sequence[str], parameters: list[Tensor], tier: HostTier):
        copies = tier.allocate([parameter.detach() for parameter in parameters])
        self.tier, self.copies = tier, [*map(stand_in_for, parameters, copies)]
        super().__init__(transform, names, self.copies)
        self.bring(range(len(parameters)), parameters)  # the chain may have changed values in `init`, such as masks
        self.landed(parameters)

    def prepare(self, parameters: list[Tensor]) -> None:
        super().prepare(self.copies)
        self.head_remembers = any(slot.startswith(f"{key}.") for key in self.head.elements for slot in self.state)
        keys = [
            key
            for key, element in self.transform.elements.items()
            if changes_updates(element) and key not in self.head.elements
        ]
        self.rest = self.transform.part(keys)
        groups = tiles([copy.numel() for copy in local_tensors(self.copies)], TILE)
        self.tiles = [(tile, update_tail(self.rest.subset(tile), [self.copies[i] for i in tile])) for tile in groups]

    def update(self, gradients: list[Tensor], parameters: list[Tensor], step: int, age: int) -> None:
        numbers = self.transform.scalars(step, age)
        self.refresh(parameters)
        self.move(self.send(gradients, parameters, numbers), numbers, partial(self.bring, parameters=parameters))
        self.landed(parameters)

    def refresh(self, parameters: list[Tensor]) -> None:
        """Update the host copies of parameters that were changed on the device."""
        self.tier.still()
        for copy, parameter, version in zip(
            local_tensors(self.copies), local_tensors(parameters), self.versions, strict=True
        ):
            if version_of(parameter) != version:
                copy.copy_(parameter)

    def send(self, gradients: list[Tensor], parameters: list[Tensor], numbers: Scalars) -> list[OffloadHandle]:
        """Run the transforms that run on the device, and send the gradients to the host."""
        if not self.head_remembers:
            gradients = self.head.update(gradients, {}, parameters, numbers)
        return [self.tier.send(gradient) for gradient in local_tensors(gradients)]

    @torch.no_grad()
    def move(self, handles: list[OffloadHandle], numbers: Scalars, on_tile: Callable[[Sequence[int]], None]) -> None:
        """Update the copies tile by tile as gradients arrive; call `on_tile` after each tile."""

        def gradient(i: int) -> Tensor:
            return on_part(self.copies[i], lambda _: self.tier.there(handles[i]))

        updates: list[Tensor] = []
        if self.head_remembers:
            updates = [gradient(i) for i in range(len(handles))]
            updates = self.head.update(updates, self.state, self.copies, numbers)
        for tile, work in self.tiles:
            gradients = [updates[i] if updates else gradient(i) for i in tile]
            state = {slot: [tensors[i] for i in tile] for slot, tensors in self.state.items()}
            work.apply(gradients, state, [self.copies[i] for i in tile], numbers)
            on_tile(tile)
        self.transform.after_step(self.state, self.copies, numbers)

    @torch.no_grad()
    def bring(self, indices: Sequence[int], parameters: list[Tensor]) -> None:
        copies, on_device = local_tensors(self.copies), local_tensors(parameters)
        for i in indices:
            self.tier.bring(copies[i], on_device[i])

    def landed(self, parameters: list[Tensor]) -> None:
        self.tier.landed()
        self.versions = [version_of(parameter) for parameter in local_tensors(parameters)]

    def eval_weights(self, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        return super().eval_weights(self.copies, numbers)

    def apply_constraints(self, parameters: list[Tensor]) -> None:
        self.refresh(parameters)
        super().apply_constraints(self.copies)
        self.bring(range(len(parameters)), parameters)
        self.landed(parameters)


class DelayedUpdate(HostCopyUpdate):
    """An update that is computed during the next step and applied after that step. The update of step `after` is the
    first delayed update.

    The host copies are then one update ahead of the parameters, and are stored in the state slot `NEXT`. Each update
    uses the gradients and the scalars of one step.
    """

    behind = True

    def __init__(
        self, transform: TransformChain, names: Sequence[str], parameters: list[Tensor], tier: HostTier, after: int
    ):
        self.after = after
        self.thread = ThreadPoolExecutor(1, "thrifty-delayed")
        self.work: Future[None] | None = None
        super().__init__(transform, names, parameters, tier)
        is_local = self.rest.reach is TransformScope.ROWS and not self.head_remembers
        if not is_local and any(is_dtensor(parameter) for parameter in parameters):
            raise RefusedError(
                "a delayed update of sharded parameters cannot communicate with other ranks during the next step",
                fix="--with optimizers.adamw; or --set techniques.memory.offload_optimizer.delay=false",
            )

    @property
    def slots(self) -> Slots:
        self.join()
        return {**self.state, NEXT: self.copies}

    def slot_kind(self, slot: str) -> Content:
        return "weights" if slot == NEXT else super().slot_kind(slot)

    def owner(self, slot: str) -> str:
        return NEXT if slot == NEXT else super().owner(slot)

    def update(self, gradients: list[Tensor], parameters: list[Tensor], step: int, age: int) -> None:
        self.join()
        if step < self.after:
            super().update(gradients, parameters, step, age)
            return
        if step > self.after and age > 0:
            self.bring(range(len(parameters)), parameters)
            self.landed(parameters)
        else:  # the first delayed update, or the state is fresh
            self.refresh(parameters)
        numbers = self.transform.scalars(step, age)
        handles = self.send(gradients, parameters, numbers)
        self.tier.still()
        self.work = self.thread.submit(self.move, handles, numbers, lambda tile: None)

    def eval_weights(self, parameters: list[Tensor], numbers: Scalars) -> list[Tensor] | None:
        self.join()
        return super().eval_weights(parameters, numbers)

    def apply_constraints(self, parameters: list[Tensor]) -> None:
        # both, since the copies may be ahead
        self.join()
        for each in (self.copies, parameters):
            self.transform.apply_constraints(self.state, each)

    def join(self) -> None:
        if self.work is not None:
            self.work.result()
            self.work = None


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Return a value that changes when the tensor is written or when its memory is replaced."""
    return tensor._version, tensor.data_ptr()


def offloaded(
    transform: GradientTransform, to: Where = "auto", folder: str = "", delayed_after: int | None = None
) -> TransformChain:
    """Return a transform whose state is in host memory or on disk, as in `offloaded(adamw(1e-3), to="disk")`.

    If the state is in the host memory of a GPU, the update runs on the host. Updates of step `delayed_after` and later
    steps are then applied one step later.
    """

    def site(transform: TransformChain, names: Sequence[str], parameters: list[Tensor]) -> UpdateLocation:
        tier = tier_for(to, parameters[0], folder)
        if not isinstance(tier, HostTier):
            return TierStateUpdate(transform, names, parameters, tier)
        if delayed_after is None:
            return HostCopyUpdate(transform, names, parameters, tier)
        return DelayedUpdate(transform, names, parameters, tier, delayed_after)

    whole = chain(transform)
    whole.site = site
    return whole


class OffloadOptimizer(Technique):
    """The optimizer's transforms run on host copies of the parameters. State on disk is a mapped file; if host memory
    is short, the file is read and written once per step. Gradients stay on the device until their norm is known,
    because clipping and the check for finite values come before the update.

    With `delay`, each update from step `after` is computed during the next step and reaches the weights one step later.
    Training then follows a different algorithm (numerics: different) and requires lower learning rates. On a quadratic
    loss, delayed Adam oscillates at learning rates at which Adam without delay converges. The default of 40 steps
    before the delay is the paper's (unverified).
    """

    stage, numerics = Stage.OFFLOAD, Numerics.EXACT

    to: Where = "auto"
    """Target: host memory, disk or a simulated link. "auto" is the host for a GPU and the disk for a CPU."""
    delay: bool = False
    """True to apply each update one step later, so that it is computed during the next step."""
    after: StepOrFraction = 40
    """First step whose update is delayed."""
    folder: str = ""
    """Folder of state offloaded to disk; $TMPDIR or /var/tmp by default."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"model"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay:
            object.__setattr__(self, "numerics", Numerics.DIFFERENT)

    @property
    def offloads_optimizer_state(self) -> bool:
        return True

    def model(self, model: nn.Module) -> nn.Module:
        tier = tier_for(self.to, next(model.parameters()), self.folder)
        if self.delay and tier.name == "disk":
            raise RefusedError(
                "an update with its state on disk runs on the device, so a delay saves no time",
                fix=f"--set techniques.{self.name}.delay=false",
            )
        add_note(f"the optimizer state is offloaded to the {tier}")
        return model

    def update(self, transform: GradientTransform) -> GradientTransform:
        return offloaded(transform, self.to, self.folder, int(self.after) if self.delay else None)

    def footprint(self, footprint: Footprint) -> Footprint:
        return footprint.scale(optimizer=0.0)
