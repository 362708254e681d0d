"""What a plan may change of a run: axes, and the ways to go along each.

A way takes techniques in, or others out; one way of each axis makes up a candidate. What is not on an axis changes what
is learned, and only a race can say whether it pays.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from thrifty.core.batch_norms import effective_numerics
from thrifty.core.errors import UsageError
from thrifty.core.mesh import Mesh
from thrifty.core.technique import Numerics, Technique
from thrifty.machine.cpu_features import has_fast_bfloat16

Catalogue = Mapping[str, type[Technique]]

NUMERICS_ORDER = (Numerics.EXACT, Numerics.ROUNDING, Numerics.DIFFERENT)
"""From the strictest promise to none."""
MICRO_BATCHES = "micro-batches"


ONE_RANK = Mesh()


def _anywhere(device: str) -> str:
    return ""


def _units(device: str) -> str:
    kind = "processor" if device == "cpu" else "GPU"
    return "" if has_fast_bfloat16(device) else f"this {kind} has no units for bfloat16: it is slower"


def _on_processors(device: str) -> str:
    return "" if device == "cpu" else "on GPUs torch's own kernel is faster"


@dataclass(frozen=True)
class OptionTemplate:
    """Techniques with their settings, and by what a step's time is expected to change beyond its FLOPs: what their
    cards say, the best of it where they promise speed. It decides what is looked at first; what is tried is measured.
    """

    techniques: Mapping[str, Mapping[str, Any]]
    factor: float
    lacks: Callable[[str], str] = _anywhere
    """What is missing for it on a device of this type; "" for nothing."""
    mesh: Mesh = ONE_RANK
    """What it is made for: over several ranks these are all of them."""
    on_processors: float = 1.0
    """By what its time changes more on a processor."""

    def factor_on(self, device: str) -> float:
        return self.factor * (self.on_processors if device == "cpu" else 1.0)


def _one(name: str, factor: float, lacks: Callable[[str], str] = _anywhere, **settings: Any) -> OptionTemplate:
    return OptionTemplate({name: settings}, factor, lacks)


def _within(name: str, factor: float, share: float) -> OptionTemplate:
    """Within a share of the bytes, which on a processor is promised of the process: freed memory is cleared again."""
    return OptionTemplate({name: {"bytes": share}}, factor, on_processors=1.3)


AXES: dict[str, tuple[OptionTemplate, ...]] = {
    "number format": (
        _one("precision.mixed", 0.6, _units),
        _one("precision.bfloat16_weights", 0.62, _units, rounding="kahan"),
    ),
    "compiled code": (
        _one("compile", 0.85),
        OptionTemplate({"compile": {}, "attention.tiled": {}}, 0.8, _on_processors),
    ),
    "recomputation": (
        _within("memory.optimal_recompute", 1.02, 0.75),
        _within("memory.optimal_recompute", 1.02, 0.5),
        _within("memory.optimal_recompute", 1.02, 0.25),
        _within("memory.activation_budget", 1.1, 0.5),
        _one("memory.recompute", 1.1, schedule="selective"),
        _one("memory.recompute", 1.02, every=2),
        _one("memory.recompute", 1.02, every=1),
    ),
    "saved tensors": (
        _one("memory.compress_activations", 1.1, bits=8),
        _one("memory.compress_activations", 1.1, bits=4),
        _one("memory.compress_activations", 1.15, bits=2),
        _one("memory.offload_activations", 1.5),
    ),
    "optimizer state": (
        _one("precision.optimizer_state", 1.01, format="bfloat16"),
        _one("precision.optimizer_state", 1.02, format="int8"),
        _one("memory.offload_optimizer", 1.03),
    ),
}
"""Options of a plan by axis, from the least to the most memory saved. A choice: the plan states why it did not
consider other techniques."""
ADAPTER_OPTIONS = (_one("adapters.lora", 0.75),)
"""Offered where the model is trained already."""


@dataclass(frozen=True)
class PlanOption:
    """One way along an axis: these techniques in, those of the names in `drops` out."""

    axis: str
    techniques: tuple[Technique, ...]
    drops: frozenset[str]
    factor: float
    numerics: Numerics
    """The loosest of what comes in, changes or goes out."""
    label: str = field(compare=False)
    mesh: Mesh = ONE_RANK

    @property
    def is_for_speed(self) -> bool:
        return self.factor < 1 or self.mesh != ONE_RANK

    @property
    def parts(self) -> int:
        return max((technique.micro_batches for technique in self.techniques), default=1)

    def apply(self, techniques: Iterable[Technique]) -> tuple[Technique, ...]:
        return (*(each for each in techniques if each.name not in self.drops), *self.techniques)


def apply_options(ways: Iterable[PlanOption], techniques: Sequence[Technique]) -> tuple[Technique, ...]:
    """A run's techniques after all of these ways."""
    for way in ways:
        techniques = way.apply(techniques)
    return tuple(techniques)


def mesh_of(ways: Iterable[PlanOption]) -> Mesh:
    """What ways of which at most one is over several ranks are laid out on."""
    return next((way.mesh for way in ways if way.mesh != ONE_RANK), ONE_RANK)


def micro_batches(batch: int, joint: bool) -> tuple[OptionTemplate, ...]:
    """The effective batch in 2, 4, 8 … parts, by the technique that suits the loss."""
    name = "large_batch.gradient_cache" if joint else "large_batch.gradient_accumulation"
    again = 4 / 3 if joint else 1.0
    parts = [2**power for power in range(1, 12) if 2**power <= batch]
    return tuple(_one(name, again * (1 + 0.01 * power), micro_batches=size) for power, size in enumerate(parts, 1))


def options_along(
    axis: str,
    offers: Sequence[OptionTemplate],
    present: Sequence[Technique],
    catalogue: Catalogue,
    device: str,
    norms: Sequence[str] = (),
) -> Iterator[PlanOption]:
    """The ways along an axis for a run with these techniques, of a model whose layers `norms` normalize over the
    batch: what is offered, and without what is there."""
    named = {name for offer in offers for name in offer.techniques}
    there = {technique.name: technique for technique in present if technique.name in named}
    own = [offer for offer in offers if offer.techniques.keys() == there.keys()]
    usual = min((offer.factor_on(device) for offer in own), default=1.0)
    if there:
        loosest = _loosest(there.values(), norms)
        yield PlanOption(axis, (), frozenset(there), 1 / usual, loosest, "without " + " and ".join(there))
    for offer in offers:
        if offer.lacks(device) or not offer.techniques.keys() <= catalogue.keys():
            continue
        try:
            made = tuple(
                _made(catalogue[name], there.get(name), settings) for name, settings in offer.techniques.items()
            )
        except UsageError:  # what the recipe says of it does not go with this
            continue
        touched = {*made} ^ {*there.values()}
        if not touched:
            continue
        numerics = _loosest(touched, norms)
        label = " + ".join(_label(technique) for technique in made)
        if offer.mesh != ONE_RANK:
            label = f"{offer.mesh.label} with {label}"
        yield PlanOption(axis, made, frozenset(there), offer.factor_on(device) / usual, numerics, label, offer.mesh)


def _loosest(techniques: Iterable[Technique], norms: Sequence[str]) -> Numerics:
    return max((effective_numerics(technique, norms) for technique in techniques), key=NUMERICS_ORDER.index)


def missing_requirements(catalogue: Catalogue, device: str) -> dict[str, str]:
    """Techniques that are on an axis but offered in no way on this device, and why."""
    offers = [offer for some in AXES.values() for offer in some]
    offered = {name for offer in offers if not offer.lacks(device) for name in offer.techniques}
    missing = ((name, offer.lacks(device)) for offer in offers for name in offer.techniques)
    return {name: why for name, why in missing if why and name not in offered and name in catalogue}


def _made(kind: type[Technique], there: Technique | None, settings: Mapping[str, Any]) -> Technique:
    return kind(**settings) if there is None else replace(there, **settings)


def _label(technique: Technique) -> str:
    changed = (entry for entry in fields(technique) if entry.init)
    shown = [f"{e.name}={getattr(technique, e.name)}" for e in changed if getattr(technique, e.name) != e.default]
    return f"{technique.name}:{','.join(shown)}" if shown else technique.name
