"""Search space of a plan: axes, and options of each axis.

An option adds or removes techniques. A candidate has at most one option per axis. Techniques without an axis change the
result of training, so only a comparison shows their effect."""

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
"""Numerics, from the strictest promise to no promise."""
MICRO_BATCHES = "micro-batches"


ONE_RANK = Mesh()


def _nothing(device: str) -> str:
    return ""


def _bfloat16(device: str) -> str:
    kind = "processor" if device == "cpu" else "GPU"
    return "" if has_fast_bfloat16(device) else f"this {kind} has no bfloat16 units, so bfloat16 is slower"


def _cpu(device: str) -> str:
    return "" if device == "cpu" else "on GPUs, torch's own kernel is faster"


@dataclass(frozen=True)
class OptionTemplate:
    """Techniques with settings, and the expected factor on step time in addition to the change of FLOPs.

    Factors are from the techniques' cards. For techniques that promise speed, the factor is the best case. Factors
    determine only the order of the search, because tried candidates are measured.
    """

    techniques: Mapping[str, Mapping[str, Any]]
    factor: float
    lacks: Callable[[str], str] = _nothing
    """Function from a device type to a missing requirement; "" if no requirement is missing."""
    mesh: Mesh = ONE_RANK
    """Mesh of the option, over all ranks."""
    on_processors: float = 1.0
    """Additional factor on step time, on a CPU."""

    def factor_on(self, device: str) -> float:
        return self.factor * (self.on_processors if device == "cpu" else 1.0)


def _one(name: str, factor: float, lacks: Callable[[str], str] = _nothing, **settings: Any) -> OptionTemplate:
    return OptionTemplate({name: settings}, factor, lacks)


def _within(name: str, factor: float, fraction: float) -> OptionTemplate:
    """Return a template of a technique whose memory limit is a fraction of the peak without a limit.

    On a CPU, the limit is for the process. Freed memory is returned to the system and cleared again, which takes time.
    """
    return OptionTemplate({name: {"bytes": fraction}}, factor, on_processors=1.3)


AXES: dict[str, tuple[OptionTemplate, ...]] = {
    "number format": (
        _one("precision.mixed", 0.6, _bfloat16),
        _one("precision.bfloat16_weights", 0.62, _bfloat16, rounding="kahan"),
    ),
    "compiled code": (
        _one("compile", 0.85),
        OptionTemplate({"compile": {}, "attention.tiled": {}}, 0.8, _cpu),
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
"""Options of a plan by axis, in ascending order of saved memory. For other techniques, the plan prints why they are
not considered."""
ADAPTER_OPTIONS = (_one("adapters.lora", 0.75),)
"""Options for pretrained models."""


@dataclass(frozen=True)
class PlanOption:
    """One option of an axis. It adds `techniques` and removes the techniques named in `drops`."""

    axis: str
    techniques: tuple[Technique, ...]
    drops: frozenset[str]
    factor: float
    numerics: Numerics
    """Least strict numerical promise of the added, changed and removed techniques."""
    label: str = field(compare=False)
    mesh: Mesh = ONE_RANK
    relative_steps: float = 1.0
    """Steps to equal loss, relative to the steps without the option. Only proven gains differ from 1."""

    @property
    def is_for_speed(self) -> bool:
        return self.factor < 1 or self.relative_steps != 1 or self.mesh != ONE_RANK

    @property
    def parts(self) -> int:
        return max((technique.micro_batches for technique in self.techniques), default=1)

    def apply(self, techniques: Iterable[Technique]) -> tuple[Technique, ...]:
        return (*(each for each in techniques if each.name not in self.drops), *self.techniques)


def apply_options(options: Iterable[PlanOption], techniques: Sequence[Technique]) -> tuple[Technique, ...]:
    """Return the techniques after all options are applied."""
    for option in options:
        techniques = option.apply(techniques)
    return tuple(techniques)


def mesh_of(options: Iterable[PlanOption]) -> Mesh:
    """Return the mesh of the option with several ranks (at most one option), else the mesh of one rank."""
    return next((option.mesh for option in options if option.mesh != ONE_RANK), ONE_RANK)


def micro_batches(batch: int, joint: bool) -> tuple[OptionTemplate, ...]:
    """Return options with 2, 4, 8 … micro-batches. They use gradient caching if the loss is `joint`
    (over all examples of a batch), else gradient accumulation.
    """
    name = "large_batch.gradient_cache" if joint else "large_batch.gradient_accumulation"
    recompute = 4 / 3 if joint else 1.0
    parts = [2**power for power in range(1, 12) if 2**power <= batch]
    return tuple(_one(name, recompute * (1 + 0.01 * power), micro_batches=size) for power, size in enumerate(parts, 1))


def options_along(
    axis: str,
    offers: Sequence[OptionTemplate],
    present: Sequence[Technique],
    catalogue: Catalogue,
    device: str,
    norms: Sequence[str] = (),
) -> Iterator[PlanOption]:
    """Yield the options of an axis: `offers`, and removal of the axis's techniques that are in `present`.

    `norms` are the names of the model's layers that normalize over the batch.
    """
    named = {name for offer in offers for name in offer.techniques}
    current = {technique.name: technique for technique in present if technique.name in named}
    own = [offer for offer in offers if offer.techniques.keys() == current.keys()]
    base_factor = min((offer.factor_on(device) for offer in own), default=1.0)
    if current:
        loosest = _loosest(current.values(), norms)
        yield PlanOption(axis, (), frozenset(current), 1 / base_factor, loosest, "without " + " and ".join(current))
    for offer in offers:
        if offer.lacks(device) or not offer.techniques.keys() <= catalogue.keys():
            continue
        try:
            techniques = tuple(
                _build(catalogue[name], current.get(name), settings) for name, settings in offer.techniques.items()
            )
        except UsageError:  # the recipe's settings of the technique conflict with the option's
            continue
        touched = {*techniques} ^ {*current.values()}
        if not touched:
            continue
        numerics = _loosest(touched, norms)
        label = " + ".join(label_of(technique) for technique in techniques)
        if offer.mesh != ONE_RANK:
            label = f"{offer.mesh.label} with {label}"
        yield PlanOption(
            axis, techniques, frozenset(current), offer.factor_on(device) / base_factor, numerics, label, offer.mesh
        )


def _loosest(techniques: Iterable[Technique], norms: Sequence[str]) -> Numerics:
    return max((effective_numerics(technique, norms) for technique in techniques), key=NUMERICS_ORDER.index)


def missing_requirements(catalogue: Catalogue, device: str) -> dict[str, str]:
    """Return the requirements that this type of device lacks, by technique name. Only techniques of the plan's axes are
    included."""
    offers = [offer for some in AXES.values() for offer in some]
    offered = {name for offer in offers if not offer.lacks(device) for name in offer.techniques}
    missing = ((name, offer.lacks(device)) for offer in offers for name in offer.techniques)
    return {name: why for name, why in missing if why and name not in offered and name in catalogue}


def _build(kind: type[Technique], current: Technique | None, settings: Mapping[str, Any]) -> Technique:
    return kind(**settings) if current is None else replace(current, **settings)


def label_of(technique: Technique) -> str:
    """Return the name of a technique and its settings that differ from the default."""
    changed = (entry for entry in fields(technique) if entry.init)
    shown = [f"{e.name}={getattr(technique, e.name)}" for e in changed if getattr(technique, e.name) != e.default]
    return f"{technique.name}:{','.join(shown)}" if shown else technique.name
