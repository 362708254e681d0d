"""Training state: exactly the contents of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thrifty.core.dtensors import is_dtensor
from thrifty.core.gradient_transform import Slots
from thrifty.core.shard_layout import FusedOrder, local_shards, local_tensor, order_of, tag_order, tag_order_like


@dataclass(frozen=True)
class StructureLogEntry:
    """Log entry of a structural change: technique, step before which it was made, and decision (plain JSON)."""

    step: int
    technique: str
    decision: Mapping[str, Any]
    reason: str = ""


class StatefulOptimizer(Protocol):
    """Optimizer that a checkpoint can store: slots of named parameters, and counters (`TransformOptimizer`)."""

    names: list[str]
    parameters: list[Tensor]
    unreached: set[str]
    """Names of parameters that no gradient has reached since the optimizer was built."""
    updates: int
    born: int
    births: dict[str, int]

    @property
    def slots(self) -> Slots: ...


@dataclass
class TrainState:
    """Step, model, optimizer, state of techniques, counters, and the log of structural changes. While logged changes
    are repeated, there is no model. A technique must then return its logged decision from the log alone."""

    step: int = 0
    model: nn.Module | None = None
    optimizer: StatefulOptimizer | None = None
    techniques: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    log: list[StructureLogEntry] = field(default_factory=list)

    def logged_decision(self, technique: str, step: int) -> Mapping[str, Any] | None:
        """Return the logged decision of a technique before `step`, or None if there is none."""
        for entry in self.log:
            if entry.technique == technique and entry.step == step:
                return entry.decision
        return None

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state under a flat name such as `optimizer/SLOT/PARAMETER`. Sharded tensors are
        not gathered."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        assert self.model is not None and self.optimizer is not None
        for name, parameter in self.model.named_parameters():
            yield f"parameters/{name}", tag_order(parameter.detach(), order_of(parameter))
        persistent = self.model.state_dict(keep_vars=True)
        for name, buffer in self.model.named_buffers():
            if name in persistent:
                yield f"buffers/{name}", buffer
        trained = dict(zip(self.optimizer.names, self.optimizer.parameters, strict=True))
        for slot, tensors in self.optimizer.slots.items():
            for (name, parameter), tensor in zip(trained.items(), tensors, strict=True):
                yield f"optimizer/{slot}/{name}", tag_order_like(parameter, tensor)
        for technique, memory in self.techniques.items():
            for name, tensor in memory.items():
                yield f"techniques/{technique}/{name}", tensor

    def scalars(self) -> dict[str, Any]:
        assert self.optimizer is not None
        return {
            "step": self.step,
            "updates": self.optimizer.updates,
            "born": self.optimizer.born,
            "births": dict(self.optimizer.births),
            "counters": self.counters,
            "log": [asdict(entry) for entry in self.log],
        }

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        assert self.optimizer is not None
        self.step = scalars["step"]
        self.optimizer.updates, self.optimizer.born = scalars["updates"], scalars["born"]
        self.optimizer.births = dict(scalars.get("births", {}))  # earlier versions had one age for all
        self.counters = dict(scalars["counters"])
        self.log = read_log(scalars)


def adopt_buffers(model: nn.Module, stored: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
    """Give the buffers of a model that were created or resized in training their `stored` shapes and dtypes, by name in
    a state. Their values are not loaded."""
    modules = dict(model.named_modules())
    for name, (shape, dtype) in stored.items():
        path, _, own = name.removeprefix("buffers/").rpartition(".")
        buffers = modules[path]._buffers if name.startswith("buffers/") and path in modules else {}
        if own in buffers and ((buffer := buffers[own]) is None or buffer.shape != torch.Size(shape)):
            device = next(model.parameters()).device if buffer is None else buffer.device
            buffers[own] = torch.empty(tuple(shape), dtype=dtype, device=device)


def read_log(scalars: Mapping[str, Any]) -> list[StructureLogEntry]:
    return [StructureLogEntry(**entry) for entry in scalars["log"]]


@torch.no_grad()
def fill_tensor(tensor: Tensor, value: Tensor) -> None:
    """Copy a full value, equal on all ranks, into a tensor. A sharded tensor receives this rank's part."""
    local = local_tensor(tensor)
    for part in local_shards(tensor):
        local[part.place].copy_(value[part.box.slices])


def full_value(tensor: Tensor, order: FusedOrder | None = None) -> Tensor:
    """Return a copy of the whole tensor, gathered if sharded. `order` is the fused order of a tensor without a tag."""
    order = order or order_of(tensor)
    # full_tensor returns an undivided tensor (one rank, a replicated tensor) itself, not a copy
    value = (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()
    return value.clone() if order is None else order.whole(value)
