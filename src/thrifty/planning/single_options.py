"""Counted footprints of single plan options, and estimated footprints of combinations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from math import prod

import torch

from thrifty.composition.compose import CPU, BaseRun, Run, compose
from thrifty.composition.explain import resident_bytes
from thrifty.core.errors import reason_of
from thrifty.core.footprint import Footprint
from thrifty.core.technique import Technique
from thrifty.distributed.fake_ranks import fake_first_rank
from thrifty.planning.cost_estimates import count_footprint, interpolate_footprint
from thrifty.planning.search_space import MICRO_BATCHES, PlanOption, apply_options, mesh_of

COUNTED_PARTS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporary", "flops")


def _leanest_first(option: PlanOption) -> tuple[bool, bool]:
    """Sort key: options that only remove techniques, then options with a memory limit, then other options."""
    return bool(option.techniques), not any(technique.limits_activation_bytes for technique in option.techniques)


@dataclass
class SingleOptionCosts:
    """Costs of single options. `base` has the techniques of the recipe, `options` the allowed options by axis."""

    plain: BaseRun
    base: tuple[Technique, ...]
    steps: int
    options: Mapping[str, Sequence[PlanOption]]
    device: torch.device = field(default=CPU, kw_only=True)
    say: Callable[[str], None] = field(default=lambda text: None, kw_only=True)
    count: Callable[[Run], Footprint] = field(default=count_footprint, kw_only=True)

    def __post_init__(self) -> None:
        self.singles: dict[PlanOption, Footprint] = {}
        self.refused: dict[PlanOption, str] = {}
        self.interpolated: set[PlanOption] = set()
        """Options with an interpolated (not counted) footprint."""
        self.measured: dict[PlanOption, float] = {}
        """Measured step times with options, relative to the unchanged recipe."""
        self.counts = 0

    @cached_property
    def plainest(self) -> Footprint:
        """Footprint of the unchanged recipe."""
        return self.counted(())

    def counted(self, options: Sequence[PlanOption]) -> Footprint:
        """Count the footprint of the first rank with all `options`.

        For several ranks, the model of the first rank is also built. This checks that the model can be divided.
        """
        self.counts += 1
        mesh = mesh_of(options)
        with fake_first_rank(mesh):
            run = compose(self.plain, apply_options(options, self.base), self.steps, self.device)
            if mesh.least_ranks > 1:
                resident_bytes(run)
            return self.count(run)

    def look_at_singles(self) -> None:
        """Count the footprint of each option alone. If an option is refused, record the reason."""
        cutting = [option for option in self.options.get(MICRO_BATCHES, ()) if option.techniques]
        cutting.sort(key=lambda option: option.parts, reverse=True)
        # a joint loss is computed differently in parts of the batch
        last = cutting.pop() if self.plain.objective.joint and len(cutting) > 1 else None
        inner = cutting[1:]
        # axes alternate, so that each axis has counted options before the time limit. If the recipe fits, the option
        # with the largest saving is last in its axis, else first (after options that only remove techniques)
        axes = [axis if self.fits() else sorted(axis[::-1], key=_leanest_first) for axis in self.options.values()]
        in_turns = (option for turn in zip_longest(*axes) for option in turn if option is not None)
        self._look_at(option for option in in_turns if option not in inner)
        if inner:
            self._interpolate(inner, cutting[0], last)

    def fits(self) -> bool:
        """Return True if the unchanged recipe fits. Options for speed are then counted before options for memory."""
        return True

    def is_counting_late(self) -> bool:
        """Return True if the time limit for counting is reached."""
        return False

    def _look_at(self, options: Iterable[PlanOption]) -> None:
        for option in options:
            if option in self.singles or option in self.refused:
                continue
            if self.is_counting_late():
                self.refused[option] = "not counted: the time limit of planning was reached"
            else:
                self._count_alone(option)

    def _count_alone(self, option: PlanOption) -> None:
        """Count the footprint of one option. If the option is refused, record the reason."""
        try:
            self.singles[option] = self.counted((option,))
            self.say(f"{option.label}: {self.singles[option].memory / 1e6:,.0f} MB counted")
        except Exception as refusal:  # a bug in one option must not stop planning
            self.refused[option] = reason_of(refusal)

    def _interpolate(self, options: Sequence[PlanOption], leanest: PlanOption, last: PlanOption | None) -> None:
        """Interpolate footprints of options between `leanest` and `last` (by default the unchanged recipe).

        Footprints are linear in the number of examples per micro-batch. If `leanest` or `last` is refused, the
        footprint of each option is counted instead.
        """
        if not {leanest, last} <= {*self.singles, None}:
            return self._look_at(options)
        parts = last.parts if last else max((each.micro_batches for each in self.base), default=1)
        few, many = self._rows(leanest.parts), self._rows(parts)
        if few == many:
            return self._look_at(options)
        end = self.singles[last] if last else self.plainest
        for option in options:
            share = (self._rows(option.parts) - few) / (many - few)
            self.singles[option] = interpolate_footprint(self.singles[leanest], end, share)
            self.interpolated.add(option)

    def _rows(self, parts: int) -> int:
        return -(-self.plain.source.batch // parts)

    def alone(self, option: PlanOption) -> Footprint:
        """Return the counted footprint of an option alone. Raises the errors of `counted`."""
        if option in self.interpolated:
            self.singles[option] = self.counted((option,))
            self.interpolated.remove(option)
        return self.singles[option]

    def relative(self, option: PlanOption) -> float:
        """Return the expected step time with an option, relative to the unchanged recipe. If it is not measured, it is
        computed from the factor in the option's card and the counted FLOPs."""
        work = self.singles[option].flops / self.plainest.flops if self.plainest.flops else 1.0
        return self.measured.get(option, option.factor * work)

    def estimated(self, options: Sequence[PlanOption]) -> float:
        """Return the estimated peak bytes with several options. The options' effects on each part of the footprint are
        assumed to be independent."""
        base, parts = self.plainest, {}
        for name in COUNTED_PARTS:
            whole = getattr(base, name)
            ratios = [getattr(self.singles[option], name) / whole for option in options] if whole else [1.0]
            parts[name] = whole * prod(ratios)
        return replace(base, **parts).memory
