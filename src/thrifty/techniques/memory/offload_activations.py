"""Activation offloading (Rhu et al. 2016): move saved activations to host memory or disk.

Paper       Rhu et al. 2016, vDNN (arXiv 1602.08124). Hooks apply the method to every saved tensor, as torch's
            `save_on_cpu` does.
Promise     Device memory holds only the last `keep_last` activations and the activations in transfer. With
            memory.recompute, almost no activation stays on the device.
Use         model = thrifty.apply(model, "offload_activations", keep_last=8)
Start with  `offload_activations:keep_last=8,prefetch=4`.
Cost        Each activation crosses the link to host memory or disk twice. On a GPU transfers overlap with computation,
            and take no extra time if computation takes longer.
Avoid       Models that fit in device memory. Links slower than recomputation: use memory.recompute.
Does not    Change any value, or offload parameters and tensors that the loss saves.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Natural, Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.memory.host_tier import OffloadHandle, StorageTier, Where, tier_for
from thrifty.memory.saved_tensor_hooks import SMALLEST, use_activation_store
from thrifty.modeling.module_surgery import wrap_forward


class OffloadingStore:
    """Store that offloads the activations of one forward pass to a tier (host memory or disk), as in
    `use_activation_store(OffloadingStore(tier))`.

    Tensors are offloaded in the order in which they are saved. A tensor is offloaded after `keep_last` more tensors are
    saved, because the backward pass reads the last tensors first. At most `prefetch` tensors are in transfer, and the
    next tensor waits for the oldest transfer. When a tensor is read, the tensors saved before it are prefetched.
    """

    def __init__(self, tier: StorageTier, prefetch: int = 4, keep_last: int = 0):
        self.tier, self.prefetch, self.keep_last = tier, prefetch, keep_last
        # weak references: the autograd graph owns the tensors
        self.saved: list[weakref.ref[_OffloadedActivation]] = []

    def store(self, activation: Tensor) -> Callable[[], Tensor]:
        new = _OffloadedActivation(self, len(self.saved), activation)
        self.saved.append(weakref.ref(new))
        if due := self.at(new.place - self.keep_last):
            due.send()
        if late := self.at(new.place - self.keep_last - self.prefetch):
            late.finish_transfer()
        return new.read

    def at(self, place: int) -> "_OffloadedActivation | None":
        return self.saved[place]() if place >= 0 else None

    def prefetch_before(self, place: int) -> None:
        """Prefetch the tensors saved before the tensor at `place`, because the backward pass reads them next."""
        for earlier in range(place - 1, place - self.prefetch - 1, -1):
            if saved := self.at(earlier):
                saved.prefetch()


class _OffloadedActivation:
    """A saved tensor, replaced by a handle once it is offloaded."""

    def __init__(self, store: OffloadingStore, place: int, tensor: Tensor):
        self.store, self.place = store, place
        self.tensor: Tensor | None = tensor
        self.handle: OffloadHandle | None = None
        self.is_read = False

    def send(self) -> None:
        assert self.tensor is not None
        self.handle, self.tensor = self.store.tier.send(self.tensor), None

    def finish_transfer(self) -> None:
        if self.handle is not None:
            self.handle.finish_transfer()

    def prefetch(self) -> None:
        if self.handle is not None and not self.is_read:
            self.handle.prefetch()

    def read(self) -> Tensor:
        self.prefetch()
        self.is_read = True
        self.store.prefetch_before(self.place)
        if self.handle is not None:
            return self.handle.get()
        assert self.tensor is not None
        return self.tensor


class OffloadingObjective(WrappedObjective):
    """Wrapper of an objective that offloads the activations of each prediction to a tier (host memory or disk)."""

    def __init__(self, inner: Objective, settings: "OffloadActivations"):
        super().__init__(inner)
        self.settings = settings

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        with use_activation_store(self.settings.store(batch.weight), self.settings.min_elements):
            return super().predict(model, batch)


class OffloadActivations(Technique):
    """On a CPU, activations are offloaded to disk or to a simulated link, because host memory is the device memory."""

    stage, numerics = Stage.OFFLOAD, Numerics.EXACT
    claims = frozenset({Claim.SAVED_TENSORS})

    to: Where = "auto"
    """Target: host memory, disk or a simulated link. "auto" is the host for a GPU and the disk for a CPU."""
    prefetch: Positive = 4
    """Maximum number of tensors in transfer, in either direction."""
    keep_last: Natural = 8
    """Number of last tensors of a forward pass that stay on the device."""
    min_elements: Positive = SMALLEST
    """Minimum number of elements of an offloaded tensor."""
    folder: str = ""
    """Folder of tensors offloaded to disk; $TMPDIR or /var/tmp by default."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        tier = tier_for(self.to, next(model.parameters()), self.folder)
        add_note(f"activations of {self.min_elements} elements and more are offloaded to the {tier}")
        return model

    def objective(self, objective: Objective) -> Objective:
        return OffloadingObjective(objective, self)

    def change_forward(self, model: nn.Module) -> None:
        def offloaded(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with use_activation_store(self.store(next(model.parameters())), self.min_elements):
                return inner(*args, **kwargs)

        wrap_forward(model, offloaded)

    def store(self, like: Tensor) -> OffloadingStore:
        """Return a store for one forward pass on the device of `like`."""
        return OffloadingStore(tier_for(self.to, like, self.folder), self.prefetch, self.keep_last)
