"""Mixed-integer program: keep, compress, offload or recompute each saved tensor, for the fastest step within a memory
budget.

One program covers all blocks. HiGHS solves it. Each item (operation output) of a block's trace has at most one action.
A saved item requires one action. The sources of a recomputed item require an exact action (not a quantized value). Two
modes of blocks replace these actions. A whole block can be recomputed at once, which is cheaper than replaying single
operations. A block can be streamed: nothing is recomputed, and offloaded tensors return one by one. The program is from
Checkmate (Jain et al. 2020, arXiv 1910.02653). Compression and offloading over a link of limited bandwidth are added as
actions (after Beaumont et al. 2021, and Patil et al. 2022, arXiv 2207.07697).
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
    plan_peak,
)
from thrifty.memory.planner.milp_variables import BlockColumns, MilpOptions
from thrifty.memory.planner.solver_stdout import suppress_stdout

SECONDS, NODES = 20.0, 200
"""Limits of the search: seconds, or branch-and-bound nodes if plans must be reproducible."""
INFEASIBLE = 2
"""Status code of scipy for a program without a solution."""


def fastest_plan(
    blocks: Sequence[BlockCosts],
    budget: float,
    compression: CompressionOption | None = None,
    link: OffloadLink | None = None,
    actions: Sequence[TensorAction] = tuple(TensorAction),
    gap: float = 0.005,
) -> MemoryPlan | None:
    """Return the plan with the least extra seconds whose peak is within the budget, or None if no plan fits.

    The plan is optimal within the relative `gap`, or the best found in 20 seconds. `MemoryPlan.gap` bounds its distance
    from the optimum. With compression, the search is limited by nodes instead of seconds, because the plan determines
    the quantization noise. Equal costs then give equal plans on any machine. If no solution exists at the limit, the
    search continues to the first solution.
    """
    program = _Program(blocks, compression, link, actions)
    solution = program.solve(budget, gap)
    if solution is None:
        return None
    chosen, seconds, distance = solution
    return MemoryPlan(tuple(chosen), seconds, plan_peak(blocks, chosen, program.bits), distance)


class _Program:
    """The mixed-integer program. Columns: the variables of each block, then the seconds that each pass waits for the
    link."""

    def __init__(
        self,
        blocks: Sequence[BlockCosts],
        compression: CompressionOption | None,
        link: OffloadLink | None,
        actions: Sequence[TensorAction],
    ):
        self.options = MilpOptions(compression, link, [action for action in TensorAction if action in actions])
        self.bits = compression.bits if compression else 0.0
        self.blocks = [BlockColumns(self.options, block) for block in blocks]
        self.waits = [self.options.column(1.0), self.options.column(1.0)] if link else []
        self.rows: list[dict[int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def solve(self, budget: float, gap: float) -> tuple[list[dict[int, TensorAction]], float, float] | None:
        for block in self.blocks:
            self._needs(block)
            self._modes(block)
        self._transfers()
        self._memory(budget)
        count, cost = len(self.options.cost), np.array(self.options.cost)
        unit = cost.mean() or 1.0  # scale costs, because the solver's tolerances are absolute
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
        end = {"node_limit": NODES} if self.options.compression else {"time_limit": SECONDS}
        with suppress_stdout():
            result = milp(**problem, options={"mip_rel_gap": gap} | end)
            if result.x is None and result.status != INFEASIBLE:  # no solution at the limit: accept the first one
                result = milp(**problem, options={"mip_rel_gap": np.inf})
        if result.x is None:
            return None
        return [block.chosen(result.x) for block in self.blocks], float(result.fun) * unit, float(result.mip_gap or 0.0)

    def _needs(self, block: BlockColumns) -> None:
        """Limit each item to one action. Require an action if the item is saved or a source of a recomputed item."""
        for number, item in block.tape.items.items():
            columns, whole = block.columns[number], block.whole
            streamed = dict.fromkeys(block.streams.get(number, {}).values(), 1.0)
            self._row(dict.fromkeys(columns.values(), 1.0) | streamed | whole, 1.0 if item.saved else 0.0, 1.0)
            if item.saved:
                self._row({columns[TensorAction.KEEP]: 1.0, block.planned: 1.0} | streamed | whole, 1.0, np.inf)
            if not item.storable:  # only autograd can keep the item, in a block without a plan
                self._row({columns[TensorAction.KEEP]: 1.0, block.planned: 1.0}, 0.0, 1.0)
            if TensorAction.RECOMPUTE not in columns:
                continue
            for source in item.reads:
                # recomputation from a quantized value would be biased
                exact = {
                    column: 1.0
                    for action, column in block.columns[source].items()
                    if action is not TensorAction.COMPRESS
                }
                self._row({**exact, columns[TensorAction.RECOMPUTE]: -1.0}, 0.0, np.inf)

    def _modes(self, block: BlockColumns) -> None:
        """Allow one mode per block (streamed, planned, wholly recomputed or plain) and one action for its input."""
        recomputed = {block.planned: 1.0} | block.whole
        if block.streamed is not None:
            self._row(recomputed | {block.streamed: 1.0}, 0.0, 1.0)
            for columns in block.streams.values():
                for column in columns.values():
                    self._row({column: 1.0, block.streamed: -1.0}, -np.inf, 0.0)
            self._row(dict.fromkeys(block.streams.get(INPUT, {}).values(), 1.0), -np.inf, 1.0)
        if block.input is not None:
            self._row({block.input: 1.0} | {column: -1.0 for column in recomputed}, -np.inf, 0.0)

    def _transfers(self) -> None:
        link = self.options.link
        if link is None:
            return
        moved = {column: size / link.bytes_per_second for b in self.blocks for column, size in b.moved().items()}
        passes = (sum(b.costs.forward for b in self.blocks), sum(b.costs.backward for b in self.blocks))
        for wait, seconds in zip(self.waits, passes, strict=True):
            self._row({**moved, wait: -1.0}, -np.inf, seconds)

    def _memory(self, budget: float) -> None:
        stored: dict[int, float] = {}
        returning: dict[int, float] = {}
        inputs = 0.0
        for block in self.blocks:
            own, always = block.stored(self.bits)
            stored |= own
            inputs += always
            for extra, constant in block.intervals():
                row = {
                    column: stored.get(column, 0.0) + extra.get(column, 0.0) for column in stored | extra
                } | returning
                self._row(
                    {c: value / budget for c, value in row.items()}, -np.inf, (budget - inputs - constant) / budget
                )
            returning = {column: stored.get(column, 0.0) + size for column, size in block.returning().items()}

    def _row(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        self.rows.append({column: value for column, value in entries.items() if value})
        self.lower.append(lower)
        self.upper.append(upper)

    def _matrix(self) -> coo_array:
        entries = [(row, column, value) for row, each in enumerate(self.rows) for column, value in each.items()]
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.options.cost))).tocsr()
