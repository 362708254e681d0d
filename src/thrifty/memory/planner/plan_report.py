"""Text report of a memory plan: its totals, and the action for each tensor with its cost."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from thrifty.memory.op_trace import INPUT, OpOutput
from thrifty.memory.planner.memory_plan import BlockCosts, MemoryPlan, TensorAction, is_whole, peak_when_kept


def summary(blocks: Sequence[BlockCosts], plan: MemoryPlan) -> str:
    """Return one line with the peak, the number of tensors per action, and the extra time of a plan.

    The last block represents everything outside the other blocks.
    """
    kept = peak_when_kept(blocks)
    counts = Counter(action.value for actions in plan.actions for action in actions.values())
    done = ", ".join(f"{count} tensors {_DONE[action]}" for action, count in sorted(counts.items()))
    return (
        f"activations of {len(blocks) - 1} blocks and the loss: {plan.peak / 1e6:,.2f} MB at the peak, "
        f"{kept / 1e6:,.2f} MB if all tensors were kept; {done}; {plan.seconds * 1e3:,.1f} ms more per step (a better "
        f"plan could save at most {plan.gap:.1%} of that); {_kind(plan)}"
    )


def _kind(plan: MemoryPlan) -> str:
    """Return the kind of plan (single tensors or whole blocks), and why it was chosen."""
    kinds = ["decided tensor by tensor", "a schedule of whole blocks, which may recompute several together"]
    chosen, other = reversed(kinds) if plan.schedule else kinds
    if plan.other_seconds is None:
        return f"{chosen}: {other} does not fit or is not possible"
    return f"{chosen}: {other} takes {plan.other_seconds * 1e3:,.1f} ms"


_DONE = {"keep": "kept", "compress": "compressed", "offload": "offloaded", "recompute": "recomputed"}


def decisions(names: Sequence[str], blocks: Sequence[BlockCosts], plan: MemoryPlan) -> list[str]:
    """Return one line per tensor of the named blocks, with its action and the cost of recomputing it.

    Blocks with equal decisions share their lines.
    """
    alike: dict[tuple, list[int]] = {}
    for place, (name, block, actions) in enumerate(zip(names, blocks, plan.actions, strict=False)):
        items = tuple((item.name, item.where, item.bytes, actions.get(n)) for n, item in block.tape.items.items())
        alike.setdefault((name.rpartition(".")[0], items), []).append(place)
    lines = []
    for places in alike.values():
        together = _span([names[place] for place in places])
        block, actions = blocks[places[0]], plan.actions[places[0]]
        items = block.tape.items
        if is_whole(block, actions):
            lines.append(f"{together}: recomputed as a whole; costs {block.whole * 1e3:.2f} ms")
        if INPUT in actions:
            lines.append(f"{together}: input, {block.tape.movable_input / 1e6:.2f} MB: {actions[INPUT].value}")
        lines += [
            f"{together}: {_decision(items[number], action)}" for number, action in actions.items() if number != INPUT
        ]
    return lines


def _span(names: Sequence[str]) -> str:
    """Return the name of blocks of one stack with their numbers. Consecutive numbers form a range: `blocks.0-3, 7`."""
    stem = names[0].rpartition(".")[0]
    numbers = [int(name.rpartition(".")[2]) for name in names]
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(str(run[0][1]) + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs)
    return f"{stem}.{ranges}" + (f" ({len(names)} blocks)" if len(names) > 1 else "")


def _decision(item: OpOutput, action: TensorAction) -> str:
    what = f"{item.where} {item.name}".strip() + f", {item.bytes / 1e6:.2f} MB"
    again = f"{item.seconds * 1e3:.2f} ms"
    if action is TensorAction.RECOMPUTE:
        reason = f"costs {again}" if item.saved else f"other tensors are computed from it; costs {again}"
    else:
        reason = f"would cost {again} to recompute" + ("" if item.saved else "; other tensors are computed from it")
    return f"{what}: {action.value}; {reason}"
