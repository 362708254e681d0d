"""What a composed run will hold and compute, technique by technique, before it runs.

Techniques are counted, not believed: for each one the run so far is built on fake tensors and a step of it is traced.
Only those that override `footprint` are taken at their word, on top of the count: their effect needs what a single
process of fake tensors does not have (other ranks, values). What a compiler saves beyond that is not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thrifty.core.accounting import count_step
from thrifty.core.compose import CPU, Composition
from thrifty.core.footprint import Footprint
from thrifty.core.optimizer import TransformOptimizer
from thrifty.core.surgery import noting
from thrifty.core.technique import Technique

COUNTED = ("model", "batches", "objective", "backward", "update")
"""Seams whose effect on memory and work shows in a traced step."""


@dataclass(frozen=True)
class Row:
    """One technique, and the footprint before and after it."""

    technique: Technique
    before: Footprint
    after: Footprint

    def as_dict(self, touched: Sequence[str]) -> dict[str, Any]:
        return {
            "name": self.technique.name,
            "stage": self.technique.stage.label,
            "numerics": self.technique.numerics.value,
            "settings": asdict(self.technique),
            "touched": list(touched),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
        }


@dataclass(frozen=True)
class Explanation:
    parameters: int
    plain: Footprint
    rows: tuple[Row, ...]
    decisions: tuple[str, ...] = ()
    """What techniques decide when they see the first batch."""

    @property
    def footprint(self) -> Footprint:
        return self.rows[-1].after if self.rows else self.plain

    def as_dict(self, notes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Plain data; `notes` are what each technique's surgery touched and skipped (`Composition.notes`)."""
        return {
            "parameters": self.parameters,
            "techniques": [row.as_dict(notes.get(row.technique.name, ())) for row in self.rows],
            "plain": self.plain.as_dict(),
            "footprint": self.footprint.as_dict(),
            "decisions": list(self.decisions),
        }


def explain(run: Composition) -> Explanation:
    """Footprints of the plain run and after each technique, at the run's full structure and last batch."""
    parameters, counted = count(run, ())
    plain, before = counted, counted
    rows: list[Row] = []
    decisions: list[str] = []
    for index, technique in enumerate(run.techniques):
        so_far = run.techniques[: index + 1]
        if not _overrides(technique, ("footprint",)) and _overrides(technique, COUNTED):
            with noting() as decisions:
                _, counted = count(run, tuple(t for t in so_far if not _overrides(t, ("footprint",))))
        after = counted
        for claimed in so_far:
            after = claimed.footprint(after)
        rows.append(Row(technique, before, after))
        before = after
    return Explanation(parameters, plain, tuple(rows), tuple(decisions))


def _overrides(technique: Technique, methods: Sequence[str]) -> bool:
    return any(getattr(type(technique), method) is not getattr(Technique, method) for method in methods)


def count(run: Composition, techniques: tuple[Technique, ...]) -> tuple[int, Footprint]:
    """The number of parameters, and one step's footprint, of the run with only these techniques."""
    part = replace(run, techniques=techniques, notes={})
    batch = part.source.at(run.steps - 1)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        plain = part.plain
        part = replace(part, plain=replace(plain, build=lambda: _faked(plain.build(), fake)), device=CPU)
        model = part.build_model()
        optimizer = TransformOptimizer(model.named_parameters(), part.transform())
        footprint = count_step(model, part.objective, part.backward, batch.map(fake.from_tensor), optimizer)
        return sum(parameter.numel() for parameter in model.parameters()), footprint


def _faked(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The model with fake tensors wherever loading weights from a file has left real ones."""
    converted: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not hasattr(parameter, "fake_mode"):
                faked = converted.setdefault(id(parameter), nn.Parameter(fake.from_tensor(parameter.detach())))
                module._parameters[name] = faked
        for name, buffer in module._buffers.items():
            if buffer is not None and not hasattr(buffer, "fake_mode"):
                module._buffers[name] = fake.from_tensor(buffer)
    return model


def touched(run: Composition) -> dict[str, list[str]]:
    """What each technique's surgery touches and skips, found on fake tensors. Raises Refused where one refuses."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        plain = run.plain
        trial = replace(run, plain=replace(plain, build=lambda: _faked(plain.build(), fake)), device=CPU, notes={})
        trial.build_model()
    return trial.notes
