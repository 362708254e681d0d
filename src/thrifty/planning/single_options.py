"""Counted footprints of single plan options, and estimates of their combinations."""

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
    """Return a sort key: options that only remove techniques, then options with a limit, which return freed memory."""
    return bool(option.techniques), not any(technique.limits_activation_bytes for technique in option.techniques)


@dataclass
class SingleOptionCosts:
    """Costs of single options. `base` are the techniques of the recipe, `options` the allowed options by axis."""

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
        """Options whose footprint was interpolated, not counted."""
        self.counts = 0

    @cached_property
    def plainest(self) -> Footprint:
        """Footprint of the unchanged recipe."""
        return self.counted(())

    def counted(self, options: Sequence[PlanOption]) -> Footprint:
        """Return the footprint with all of these options, of the first rank.

        Over several ranks that rank's model is also built, because the claims of techniques do not check that a model
        can be divided.
        """
        self.counts += 1
        mesh = mesh_of(options)
        with fake_first_rank(mesh):
            run = compose(self.plain, apply_options(options, self.base), self.steps, self.device)
            if mesh.least_ranks > 1:
                resident_bytes(run)
            return self.count(run)

    def look_at_singles(self) -> None:
        """Count the footprint of every option alone, or record why it is refused."""
        cutting = [option for option in self.options.get(MICRO_BATCHES, ()) if option.techniques]
        cutting.sort(key=lambda option: option.parts, reverse=True)
        # a joint loss is computed differently in parts of the batch
        last = cutting.pop() if self.plain.objective.joint and len(cutting) > 1 else None
        inner = cutting[1:]
        # axes take turns, so that each has options counted before the time limit; the largest saving of an axis is last
        # if the recipe fits, else first, after options that only remove techniques
        axes = [axis if self.fits() else sorted(axis[::-1], key=_leanest_first) for axis in self.options.values()]
        in_turns = (option for turn in zip_longest(*axes) for option in turn if option is not None)
        self._look_at(option for option in in_turns if option not in inner)
        if inner:
            self._interpolate(inner, cutting[0], last)

    def fits(self) -> bool:
        """Return True if the unchanged recipe fits, so that faster options rank before leaner ones."""
        return True

    def is_counting_late(self) -> bool:
        """Return True if the time limit for counting is reached."""
        return False

    def _look_at(self, options: Iterable[PlanOption]) -> None:
        for option in options:
            if self.is_counting_late():
                self.refused[option] = "not counted: the time limit of planning was reached"
                continue
            try:
                self.singles[option] = self.counted((option,))
                self.say(f"{option.label}: {self.singles[option].memory / 1e6:,.0f} MB counted")
            except Exception as refusal:  # a bug in one option must not end the plan
                self.refused[option] = reason_of(refusal)

    def _interpolate(self, options: Sequence[PlanOption], leanest: PlanOption, last: PlanOption | None) -> None:
        """Interpolate footprints of options between the leanest and `last`, or the unchanged recipe.

        Footprints are linear in the examples of a micro-batch. Options are counted if one of the ends is refused.
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
        """Return the examples of a micro-batch."""
        return -(-self.plain.source.batch // parts)

    def alone(self, option: PlanOption) -> Footprint:
        """Return the counted footprint of an option alone. Raises as counting does."""
        if option in self.interpolated:
            self.singles[option] = self.counted((option,))
            self.interpolated.remove(option)
        return self.singles[option]

    def relative(self, option: PlanOption) -> float:
        """Return the expected time of a step with an option over the unchanged one, by its card and counted FLOPs."""
        return option.factor * self.singles[option].flops / max(self.plainest.flops, 1.0)

    def estimated(self, options: Sequence[PlanOption]) -> float:
        """Return the estimated bytes at the peak, as if the options' effects on each part were independent."""
        base, parts = self.plainest, {}
        for name in COUNTED_PARTS:
            whole = getattr(base, name)
            ratios = [getattr(self.singles[option], name) / whole for option in options] if whole else [1.0]
            parts[name] = whole * prod(ratios)
        return replace(base, **parts).memory
