"""What each way of a plan does by itself, counted, and what several together are expected to do."""

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


def _leanest_first(way: PlanOption) -> tuple[bool, bool]:
    """Sort first what only takes techniques out, then what promises a limit: its process gives freed memory back."""
    return bool(way.techniques), not any(technique.limits_activation_bytes for technique in way.techniques)


@dataclass
class SingleOptionCosts:
    """`base` are the techniques of the recipe, `ways` those that may be gone, by axis."""

    plain: BaseRun
    base: tuple[Technique, ...]
    steps: int
    ways: Mapping[str, Sequence[PlanOption]]
    device: torch.device = field(default=CPU, kw_only=True)
    say: Callable[[str], None] = field(default=lambda text: None, kw_only=True)
    count: Callable[[Run], Footprint] = field(default=count_footprint, kw_only=True)

    def __post_init__(self) -> None:
        self.singles: dict[PlanOption, Footprint] = {}
        self.refused: dict[PlanOption, str] = {}
        self.told: set[PlanOption] = set()
        """Ways whose footprint was not counted, but follows from those of others."""
        self.counts = 0

    @cached_property
    def plainest(self) -> Footprint:
        """Of the recipe as it is."""
        return self.counted(())

    def counted(self, ways: Sequence[PlanOption]) -> Footprint:
        """With all of these ways; over several ranks of the first, which is built as well: what techniques claim over a
        mesh says nothing of models that cannot be so divided."""
        self.counts += 1
        mesh = mesh_of(ways)
        with fake_first_rank(mesh):
            run = compose(self.plain, apply_options(ways, self.base), self.steps, self.device)
            if mesh.least_ranks > 1:
                resident_bytes(run)
            return self.count(run)

    def look_at_singles(self) -> None:
        """The footprint of every way by itself, or why it is refused."""
        cutting = [way for way in self.ways.get(MICRO_BATCHES, ()) if way.techniques]
        cutting.sort(key=lambda way: way.parts, reverse=True)
        # a joint loss is computed in another manner where its batch is cut
        last = cutting.pop() if self.plain.objective.joint and len(cutting) > 1 else None
        inner = cutting[1:]
        # in turns, so that each axis has its share where time is short; on each what saves most memory stands last,
        # and what only takes techniques out stands first
        axes = [some if self.fits() else sorted(some[::-1], key=_leanest_first) for some in self.ways.values()]
        in_turns = (way for turn in zip_longest(*axes) for way in turn if way is not None)
        self._look_at(way for way in in_turns if way not in inner)
        if inner:
            self._tell(inner, cutting[0], last)

    def fits(self) -> bool:
        """Return True if the unchanged recipe fits, so that faster options rank before leaner ones."""
        return True

    def is_counting_late(self) -> bool:
        """Return True if the time for counting is up."""
        return False

    def _look_at(self, ways: Iterable[PlanOption]) -> None:
        for way in ways:
            if self.is_counting_late():
                self.refused[way] = "not counted: the time for planning was up"
                continue
            try:
                self.singles[way] = self.counted((way,))
                self.say(f"{way.label}: {self.singles[way].memory / 1e6:,.0f} MB counted")
            except Exception as refusal:  # a bug of one option is no reason to end the plan
                self.refused[way] = reason_of(refusal)

    def _tell(self, ways: Sequence[PlanOption], leanest: PlanOption, last: PlanOption | None) -> None:
        """Estimate ways between the leanest and `last`, or the recipe as it is: what depends on the examples of a
        micro-batch does so on a straight line. Count them if one of the two is refused."""
        if not {leanest, last} <= {*self.singles, None}:
            return self._look_at(ways)
        parts = last.parts if last else max((each.micro_batches for each in self.base), default=1)
        few, many = self._rows(leanest.parts), self._rows(parts)
        if few == many:
            return self._look_at(ways)
        end = self.singles[last] if last else self.plainest
        for way in ways:
            share = (self._rows(way.parts) - few) / (many - few)
            self.singles[way] = interpolate_footprint(self.singles[leanest], end, share)
            self.told.add(way)

    def _rows(self, parts: int) -> int:
        """Return the examples of a micro-batch."""
        return -(-self.plain.source.batch // parts)

    def alone(self, way: PlanOption) -> Footprint:
        """The footprint of a way by itself, counted. Raises as counting does."""
        if way in self.told:
            self.singles[way] = self.counted((way,))
            self.told.remove(way)
        return self.singles[way]

    def relative(self, way: PlanOption) -> float:
        """What a way is expected to make of a step's time: by its card, and by the FLOPs that were counted."""
        return way.factor * self.singles[way].flops / max(self.plainest.flops, 1.0)

    def estimated(self, ways: Sequence[PlanOption]) -> float:
        """Bytes at the peak, as if what each way does to each part did not depend on the others."""
        base, parts = self.plainest, {}
        for name in COUNTED_PARTS:
            whole = getattr(base, name)
            ratios = [getattr(self.singles[way], name) / whole for way in ways] if whole else [1.0]
            parts[name] = whole * prod(ratios)
        return replace(base, **parts).memory
