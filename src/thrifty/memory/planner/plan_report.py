"""A memory plan as a person reads it: what it comes to, and what happens to each tensor and why."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from thrifty.memory.op_trace import INPUT, OpOutput
from thrifty.memory.planner.memory_plan import BlockCosts, MemoryPlan, TensorAction, is_whole, peak_when_kept


def summary(blocks: Sequence[BlockCosts], plan: MemoryPlan) -> str:
    """What a plan for these blocks, the last of which stands for all that is outside of them, comes to."""
    kept = peak_when_kept(blocks)
    counts = Counter(way.value for ways in plan.ways for way in ways.values())
    done = ", ".join(f"{count} tensors {_DONE[way]}" for way, count in sorted(counts.items()))
    return (
        f"activations of {len(blocks) - 1} blocks and the loss: {plan.peak / 1e6:,.2f} MB at the peak, "
        f"{kept / 1e6:,.2f} MB if all were kept; {done}; {plan.seconds * 1e3:,.1f} ms a step longer, of which a better "
        f"plan could save {plan.gap:.1%}; {_kind(plan)}"
    )


def _kind(plan: MemoryPlan) -> str:
    """Whether single tensors or the chain of blocks are planned, and why."""
    kinds = ["decided tensor by tensor", "a schedule of whole blocks, which may run again several together"]
    chosen, other = reversed(kinds) if plan.schedule else kinds
    if plan.instead_of is None:
        return f"{chosen}: {other} does not fit, or cannot be"
    return f"{chosen}: {other} takes {plan.instead_of * 1e3:,.1f} ms"


_DONE = {"keep": "kept", "compress": "compressed", "offload": "offloaded", "recompute": "made again"}


def decisions(names: Sequence[str], blocks: Sequence[BlockCosts], plan: MemoryPlan) -> list[str]:
    """A line for each tensor of the named blocks, those together for which the same was decided, with what making it
    again costs or would cost."""
    alike: dict[tuple, list[int]] = {}
    for place, (name, block, ways) in enumerate(zip(names, blocks, plan.ways, strict=False)):
        items = tuple((item.name, item.where, item.bytes, ways.get(n)) for n, item in block.tape.items.items())
        alike.setdefault((name.rpartition(".")[0], items), []).append(place)
    lines = []
    for places in alike.values():
        together = _span([names[place] for place in places])
        block, ways = blocks[places[0]], plan.ways[places[0]]
        items = block.tape.items
        if is_whole(block, ways):
            lines.append(f"{together}: made again as a whole; costs {block.whole * 1e3:.2f} ms")
        if INPUT in ways:
            lines.append(f"{together}: input, {block.tape.movable_input / 1e6:.2f} MB: {ways[INPUT].value}")
        lines += [f"{together}: {_decision(items[number], way)}" for number, way in ways.items() if number != INPUT]
    return lines


def _span(names: Sequence[str]) -> str:
    """Blocks of one stack by their numbers, those that follow each other as a range: `blocks.0-3, 7`."""
    stem = names[0].rpartition(".")[0]
    numbers = [int(name.rpartition(".")[2]) for name in names]
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ranges = ", ".join(str(run[0][1]) + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs)
    return f"{stem}.{ranges}" + (f" ({len(names)} blocks)" if len(names) > 1 else "")


def _decision(item: OpOutput, way: TensorAction) -> str:
    what = f"{item.where} {item.name}".strip() + f", {item.bytes / 1e6:.2f} MB"
    again = f"{item.seconds * 1e3:.2f} ms"
    if way is TensorAction.RECOMPUTE:
        reason = f"costs {again}" if item.saved else f"others are made from it; costs {again}"
    else:
        reason = f"would cost {again} to make again" + ("" if item.saved else "; others are made from it")
    return f"{what}: {way.value}; {reason}"
