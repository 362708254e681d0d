"""Activation offloading (Rhu et al. 2016): move saved activations to host memory or disk.

Paper       Rhu et al. 2016, vDNN (arXiv 1602.08124), for every saved tensor through hooks, as torch's `save_on_cpu`.
Promise     Of all activations only the last `keep_last` and those in transfer occupy device memory. With
            memory.recompute, hardly any.
Use         model = thrifty.apply(model, "offload_activations", keep_last=8)
Start with  `offload_activations:keep_last=8,prefetch=4`.
Cost        Each byte crosses the link twice. On a GPU transfers overlap with computation, and cost no time if
            computation takes longer.
Avoid       Models that fit. Links slower than recomputation: use memory.recompute.
Does not    Change any value. Move parameters, or tensors that the loss saves.
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
    """Keeps the activations of one forward pass on a tier: `use_activation_store(Offloading(tier))` around any forward
    pass.

    Tensors are sent in the order in which they are saved, each once `keep_last` more have come, since those saved last
    are needed first. At most `prefetch` are on their way: before one more leaves the first of them must be gone, and
    when one is asked for, those saved before it are sent for.
    """

    def __init__(self, tier: StorageTier, prefetch: int = 4, keep_last: int = 0):
        self.tier, self.prefetch, self.keep_last = tier, prefetch, keep_last
        # they live as long as the graph that saved them
        self.saved: list[weakref.ref[_OffloadedActivation]] = []

    def store(self, activation: Tensor) -> Callable[[], Tensor]:
        new = _OffloadedActivation(self, len(self.saved), activation)
        self.saved.append(weakref.ref(new))
        if due := self.at(new.place - self.keep_last):
            due.send()
        if late := self.at(new.place - self.keep_last - self.prefetch):
            late.finish_transfer()
        return new.give

    def at(self, place: int) -> "_OffloadedActivation | None":
        return self.saved[place]() if place >= 0 else None

    def send_for_those_before(self, place: int) -> None:
        """Begins the way back of what will be asked for next."""
        for each in range(place - 1, place - self.prefetch - 1, -1):
            if saved := self.at(each):
                saved.prefetch()


class _OffloadedActivation:
    """One saved tensor: itself until it is sent, its ticket from then on."""

    def __init__(self, keeper: OffloadingStore, place: int, tensor: Tensor):
        self.keeper, self.place = keeper, place
        self.tensor: Tensor | None = tensor
        self.ticket: OffloadHandle | None = None
        self.given = False

    def send(self) -> None:
        assert self.tensor is not None
        self.ticket, self.tensor = self.keeper.tier.send(self.tensor), None

    def finish_transfer(self) -> None:
        if self.ticket is not None:
            self.ticket.finish_transfer()

    def prefetch(self) -> None:
        if self.ticket is not None and not self.given:
            self.ticket.prefetch()

    def give(self) -> Tensor:
        self.prefetch()
        self.given = True
        self.keeper.send_for_those_before(self.place)
        if self.ticket is not None:
            return self.ticket.get()
        assert self.tensor is not None
        return self.tensor


class OffloadingObjective(WrappedObjective):
    """Another objective whose predictions leave their activations on a tier."""

    def __init__(self, inner: Objective, settings: "OffloadActivations"):
        super().__init__(inner)
        self.settings = settings

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        with use_activation_store(self.settings.store(batch.weight), self.settings.min_elements):
            return super().predict(model, batch)


class OffloadActivations(Technique):
    """On a CPU the only second memory is the disk."""

    stage, numerics = Stage.OFFLOAD, Numerics.EXACT
    claims = frozenset({Claim.SAVED_TENSORS})

    to: Where = "auto"
    """The host's memory, a disk, or a simulated link; "auto" is the host on a GPU and the disk on a processor."""
    prefetch: Positive = 4
    """Tensors on their way at a time, out or back."""
    keep_last: Natural = 8
    """Of the tensors of a forward pass, how many of the last stay."""
    min_elements: Positive = SMALLEST
    """Tensors of fewer numbers stay."""
    folder: str = ""
    """For files; $TMPDIR or /var/tmp by default."""

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"objective"})

    def model(self, model: nn.Module) -> nn.Module:
        tier = tier_for(self.to, next(model.parameters()), self.folder)
        add_note(f"activations of {self.min_elements} numbers and more go to the {tier}")
        return model

    def objective(self, objective: Objective) -> Objective:
        return OffloadingObjective(objective, self)

    def change_forward(self, model: nn.Module) -> None:
        def offloaded(model: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with use_activation_store(self.store(next(model.parameters())), self.min_elements):
                return inner(*args, **kwargs)

        wrap_forward(model, offloaded)

    def store(self, like: Tensor) -> OffloadingStore:
        """Make the store of one forward pass, for a device on which this tensor is."""
        return OffloadingStore(tier_for(self.to, like, self.folder), self.prefetch, self.keep_last)
