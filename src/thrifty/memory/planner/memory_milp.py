"""Which saved tensor is kept, compressed, offloaded or made again, so that a step is fastest within a budget of bytes.

One mixed-integer program over all blocks, solved by HiGHS. For each item of a block's tape at most one of the ways
holds; what autograd saves needs one, and what an item that is made again is made from needs an exact one. Or a whole
block is made again at once, as recompute does, which costs less than to follow its operations one by one. Or nothing of
it is made again, and what waits elsewhere comes back tensor by tensor. The program of Checkmate (Jain et al. 2020,
arXiv 1910.02653), with compression and with offload under a link's bandwidth (after Beaumont et al. 2021, and Patil et
al. 2022, arXiv 2207.07697) as further ways.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from thrifty.memory.op_trace import INPUT
from thrifty.memory.planner.memory_plan import (
    BlockCosts,
    CompressionOption,
    MemoryPlan,
    OffloadLink,
    TensorAction,
    peak_of_ways,
)
from thrifty.memory.planner.milp_variables import BlockColumns, MilpOptions
from thrifty.memory.planner.solver_stdout import suppress_stdout

SECONDS, NODES = 20.0, 200
"""How long the search goes on at most, and where plans must be the same again, how far."""
INFEASIBLE = 2
"""What scipy calls a program that nothing satisfies."""


def fastest_plan(
    blocks: Sequence[BlockCosts],
    budget: float,
    compression: CompressionOption | None = None,
    link: OffloadLink | None = None,
    ways: Sequence[TensorAction] = tuple(TensorAction),
    gap: float = 0.005,
) -> MemoryPlan | None:
    """The plan with the least extra seconds whose peak is within the budget; None where there is none.

    Optimal within the relative `gap`, or the best that was found in 20 seconds: the plan says how far it may be from
    the best. With compression, whose noise is the plan's, the search ends after a number of nodes instead, so that the
    same costs give the same plan on a machine of any speed. A search that ends with none goes on to the first.
    """
    program = _Program(blocks, compression, link, ways)
    solution = program.solve(budget, gap)
    if solution is None:
        return None
    chosen, seconds, distance = solution
    return MemoryPlan(tuple(chosen), seconds, peak_of_ways(blocks, chosen, program.bits), distance)


class _Program:
    """Columns: those of each block, then the seconds that either pass waits for the link."""

    def __init__(
        self,
        blocks: Sequence[BlockCosts],
        compression: CompressionOption | None,
        link: OffloadLink | None,
        ways: Sequence[TensorAction],
    ):
        self.offers = MilpOptions(compression, link, [way for way in TensorAction if way in ways])
        self.bits = compression.bits if compression else 0.0
        self.blocks = [BlockColumns(self.offers, block) for block in blocks]
        self.waits = [self.offers.column(1.0), self.offers.column(1.0)] if link else []
        self.rows: list[dict[int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def solve(self, budget: float, gap: float) -> tuple[list[dict[int, TensorAction]], float, float] | None:
        for block in self.blocks:
            self._needs(block)
            self._modes(block)
        self._transfers()
        self._memory(budget)
        count, cost = len(self.offers.cost), np.array(self.offers.cost)
        unit = cost.mean() or 1.0  # the solver's tolerances are absolute
        whole = np.ones(count)
        whole[self.waits] = 0
        upper = np.ones(count)
        upper[self.waits] = np.inf
        problem = {
            "c": cost / unit,
            "constraints": LinearConstraint(self._matrix(), self.lower, self.upper),
            "integrality": whole,
            "bounds": Bounds(np.zeros(count), upper),
        }
        end = {"node_limit": NODES} if self.offers.compression else {"time_limit": SECONDS}
        with suppress_stdout():
            result = milp(**problem, options={"mip_rel_gap": gap} | end)
            if result.x is None and result.status != INFEASIBLE:  # cut off before it found any: then the first there is
                result = milp(**problem, options={"mip_rel_gap": np.inf})
        if result.x is None:
            return None
        return [block.chosen(result.x) for block in self.blocks], float(result.fun) * unit, float(result.mip_gap or 0.0)

    def _needs(self, block: BlockColumns) -> None:
        """Of each item one way at most, and one at least where it is saved or needed."""
        for number, item in block.tape.items.items():
            ways, whole = block.ways[number], block.whole
            elsewhere = dict.fromkeys(block.away.get(number, {}).values(), 1.0)
            self._row(dict.fromkeys(ways.values(), 1.0) | elsewhere | whole, 1.0 if item.saved else 0.0, 1.0)
            if item.saved:
                self._row({ways[TensorAction.KEEP]: 1.0, block.planned: 1.0} | elsewhere | whole, 1.0, np.inf)
            if not item.storable:  # autograd itself can keep it, where nothing is planned
                self._row({ways[TensorAction.KEEP]: 1.0, block.planned: 1.0}, 0.0, 1.0)
            if TensorAction.RECOMPUTE not in ways:
                continue
            for source in item.reads:
                # made from codes it would not be the expectation of anything
                exact = {column: 1.0 for way, column in block.ways[source].items() if way is not TensorAction.COMPRESS}
                self._row({**exact, ways[TensorAction.RECOMPUTE]: -1.0}, 0.0, np.inf)

    def _modes(self, block: BlockColumns) -> None:
        """A block is streamed, planned, made again as a whole, or none of these; its input is moved in one way."""
        again = {block.planned: 1.0} | block.whole
        if block.streamed is not None:
            self._row(again | {block.streamed: 1.0}, 0.0, 1.0)
            for ways in block.away.values():
                for column in ways.values():
                    self._row({column: 1.0, block.streamed: -1.0}, -np.inf, 0.0)
            self._row(dict.fromkeys(block.away.get(INPUT, {}).values(), 1.0), -np.inf, 1.0)
        if block.input is not None:
            self._row({block.input: 1.0} | {column: -1.0 for column in again}, -np.inf, 0.0)

    def _transfers(self) -> None:
        link = self.offers.link
        if link is None:
            return
        moved = {column: size / link.bytes_per_second for b in self.blocks for column, size in b.moved().items()}
        passes = (sum(b.costs.forward for b in self.blocks), sum(b.costs.backward for b in self.blocks))
        for wait, seconds in zip(self.waits, passes, strict=True):
            self._row({**moved, wait: -1.0}, -np.inf, seconds)

    def _memory(self, budget: float) -> None:
        stored: dict[int, float] = {}
        coming: dict[int, float] = {}
        inputs = 0.0
        for block in self.blocks:
            own, always = block.stored(self.bits)
            stored |= own
            inputs += always
            for beside, constant in block.moments():
                row = {column: stored.get(column, 0.0) + beside.get(column, 0.0) for column in stored | beside} | coming
                self._row(
                    {c: value / budget for c, value in row.items()}, -np.inf, (budget - inputs - constant) / budget
                )
            coming = {column: stored.get(column, 0.0) + size for column, size in block.coming().items()}

    def _row(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        self.rows.append({column: value for column, value in entries.items() if value})
        self.lower.append(lower)
        self.upper.append(upper)

    def _matrix(self) -> coo_array:
        entries = [(row, column, value) for row, each in enumerate(self.rows) for column, value in each.items()]
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.offers.cost))).tocsr()
