"""A memory plan as a person reads it: what it comes to, and what happens to each tensor and why."""

from collections import Counter
from collections.abc import Sequence

from thrifty.core.tape import Item
from thrifty.kernels.memory_plan import BlockCosts, MemoryPlan, Way, peak_when_kept


def summary(blocks: Sequence[BlockCosts], plan: MemoryPlan) -> str:
    """What a plan for these blocks, the last of which stands for all that is outside of them, comes to."""
    kept = peak_when_kept(blocks)
    counts = Counter(way.value for ways in plan.ways for way in ways.values())
    done = ", ".join(f"{count} tensors {_DONE[way]}" for way, count in sorted(counts.items()))
    return (
        f"activations of {len(blocks) - 1} blocks and the loss: {plan.peak / 1e6:,.2f} MB at the peak, "
        f"{kept / 1e6:,.2f} MB if all were kept; {done}; {plan.seconds * 1e3:,.1f} ms a step longer, of which a better "
        f"plan could save {plan.gap:.1%}"
    )


_DONE = {"keep": "kept", "compress": "compressed", "offload": "offloaded", "recompute": "made again"}


def decisions(names: Sequence[str], blocks: Sequence[BlockCosts], plan: MemoryPlan) -> list[str]:
    """A line for each tensor of the named blocks, those together for which the same was decided, with what making it
    again costs or would cost."""
    alike: dict[tuple, list[int]] = {}
    for place, (_, block, ways) in enumerate(zip(names, blocks, plan.ways, strict=False)):
        items = tuple((item.name, item.where, item.bytes, ways.get(n)) for n, item in block.tape.items.items())
        alike.setdefault(items, []).append(place)
    lines = []
    for places in alike.values():
        together = _span([names[place] for place in places])
        items, ways = blocks[places[0]].tape.items, plan.ways[places[0]]
        lines += [f"{together}: {_decision(items[number], way)}" for number, way in ways.items()]
    return lines


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rpartition('.')[2]} ({len(names)} blocks)"


def _decision(item: Item, way: Way) -> str:
    what = f"{item.where} {item.name}".strip() + f", {item.bytes / 1e6:.2f} MB"
    again = f"{item.seconds * 1e3:.2f} ms"
    if way is Way.RECOMPUTE:
        reason = f"costs {again}" if item.saved else f"others are made from it; costs {again}"
    else:
        reason = f"would cost {again} to make again" + ("" if item.saved else "; others are made from it")
    return f"{what}: {way.value}; {reason}"
