"""Pipeline schedules as data: what each rank does, in which order.

A model is cut into stages, an effective batch into parts (micro-batches). The forward pass of a stage needs that of the
stage before; its backward pass needs that of the stage after, and may be in two: the gradient of the input, which the
stage before waits for, and that of the weights, which nobody waits for (Qi et al. 2023, arXiv 2401.10241).
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from thrifty.core.errors import UsageError, refuse_unknown

Kind = Literal["F", "B", "I", "W"]


class ScheduleAction(NamedTuple):
    """One piece of a rank's work."""

    kind: Kind
    """F: forward. B: backward, whole. I: the gradient of the input only. W: that of the weights only, after I."""
    stage: int
    """Counted along the model, over all ranks and chunks."""
    part: int
    """Which micro-batch."""


Order = list[ScheduleAction]


def schedule(name: str, ranks: int, parts: int, chunks: int = 1) -> list[Order]:
    """What each pipeline rank does, in order, for `parts` micro-batches.

    `chunks` stages stand on a rank: 1, any number for "interleaved" (stage s on rank s mod ranks), 2 for
    "zero_bubble_v" (there and back again: stages r and 2 ranks - 1 - r on rank r). Raises UsageError for sizes that a
    schedule is not made for.
    """
    refuse_unknown("unknown pipeline schedule", name, _SCHEDULES)
    if min(ranks, parts, chunks) < 1:
        raise UsageError(f"{ranks} ranks, {parts} parts and {chunks} chunks", fix="each is 1 or more")
    wanted = {"interleaved": chunks, "zero_bubble_v": 2}.get(name, 1)
    if chunks != wanted:
        raise UsageError(f"{name} with {chunks} stages a rank", fix=f"set chunks to {wanted}, or choose interleaved")
    return [_SCHEDULES[name](rank, ranks, parts, chunks) for rank in range(ranks)]


def _gpipe(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """All forward, then all backward, the last first, so that its activations need not wait (Huang et al. 2019)."""
    there = [ScheduleAction("F", rank, part) for part in range(parts)]
    return there + [ScheduleAction("B", rank, part) for part in reversed(range(parts))]


def _one_forward_one_backward(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """As few micro-batches alive as keep all ranks busy (PipeDream-Flush: Narayanan et al. 2021, arXiv 2006.09503)."""
    there = [ScheduleAction("F", rank, part) for part in range(parts)]
    return _woven(there, [[ScheduleAction("B", rank, part)] for part in range(parts)], ranks - rank - 1)


def _interleaved(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Several stages a rank, visited in rounds of `ranks` micro-batches (Narayanan et al. 2021, arXiv 2104.04473)."""
    if parts % ranks:
        raise UsageError(
            f"interleaved goes through {ranks} micro-batches at a time, {parts} are no multiple of it",
            fix=f"use {parts - parts % ranks or ranks} micro-batches, or the schedule 1f1b",
        )
    rounds = [range(start, start + ranks) for start in range(0, parts, ranks)]
    there = [ScheduleAction("F", c * ranks + rank, part) for turn in rounds for c in range(chunks) for part in turn]
    back = [
        ScheduleAction("B", c * ranks + rank, part) for turn in rounds for c in reversed(range(chunks)) for part in turn
    ]
    return _woven(there, [[action] for action in back], 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _zero_bubble(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """ZB-H1: 1F1B whose gradients of weights come later the further down a rank is, so that every rank holds as many
    micro-batches as the first and has work while it waits at the end (Qi et al. 2023).

    Table 2's bubble of (ranks - 1)(F + I - W) seconds holds while W takes no longer than F and I, as in Transformers
    without recompute. Beyond that it is (ranks - 1) max(F, I).
    """
    there = [ScheduleAction("F", rank, part) for part in range(parts)]
    back = [
        [ScheduleAction("I", rank, part)] + [ScheduleAction("W", rank, part - rank)] * (part >= rank)
        for part in range(parts)
    ]
    left = [ScheduleAction("W", rank, part) for part in range(max(parts - rank, 0), parts)]
    return _woven(there, back, ranks - rank - 1) + left


def _zero_bubble_v(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """ZB-V: down the ranks and up again, so that the first rank has the loss (Qi et al. 2023, section 6).

    Made for 2 ranks - 1 micro-batches or more; with fewer, the same order without those that are missing.
    """
    down, up, many = rank, 2 * ranks - 1 - rank, max(parts, 2 * ranks - 1)
    order: Order = []
    done = dict.fromkeys(((kind, stage) for kind in "FIW" for stage in (down, up)), 0)

    def do(kinds: str, stage: int, times: int = 1) -> None:
        for _ in range(times):
            for kind in kinds:
                order.append(ScheduleAction(kind, stage, done[kind, stage]))
                done[kind, stage] += 1

    do("F", down, 2 * (ranks - rank) - 1)
    for _ in range(rank):
        do("F", up)
        do("F", down)
    do("FIW", up, ranks - rank)
    while done["F", up] < many:
        do("F", down, min(1, many - done["F", down]))
        do("IW", down)
        do("FIW", up)
    for _ in range(rank):
        do("I", down)
        do("I", up)
    do("IW", down, ranks - rank)
    do("W", up, many - done["W", up])
    do("W", down, many - done["W", down])
    return [action for action in order if action.part < parts]


def _woven(there: Order, back: Sequence[Order], ahead: int) -> Order:
    """Forward passes, the first `ahead` of them alone, then each followed by one of `back`, then the rest of `back`."""
    ahead = min(ahead, len(there))
    order = there[:ahead]
    for position, after in enumerate(back):
        order += [*there[ahead + position : ahead + position + 1], *after]
    return order


_SCHEDULES = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "zero_bubble_v": _zero_bubble_v,
}
SCHEDULES = tuple(_SCHEDULES)

Result = tuple[str, int, int]
"""What an action leaves for others: ("output" or "gradient", stage, part)."""


def needs(action: ScheduleAction, stages: int) -> Result | None:
    """What must be there before an action can start; None for the input of the model."""
    kind, stage, part = action
    if kind == "F":
        return ("output", stage - 1, part) if stage else None
    if kind == "W":
        return "gradient", stage, part
    return ("gradient", stage + 1, part) if stage + 1 < stages else ("output", stage, part)


def leaves(action: ScheduleAction) -> Result | None:
    """What an action makes that others need; `W` leaves nothing that is waited for."""
    kind, stage, part = action
    return None if kind == "W" else ("output" if kind == "F" else "gradient", stage, part)


def placement(orders: Sequence[Sequence[ScheduleAction]]) -> list[int]:
    """The rank of each stage. Raises UsageError where a stage stands on two ranks or on none."""
    places: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for stage in {action.stage for action in order}:
            if places.setdefault(stage, rank) != rank:
                raise UsageError(f"stage {stage} stands on ranks {places[stage]} and {rank}", fix="keep it on one")
    if sorted(places) != list(range(len(places))):
        raise UsageError(f"a pipeline of the stages {sorted(places)}", fix="count stages from 0, leaving out none")
    return [places[stage] for stage in range(len(places))]


def walk(
    orders: Sequence[Sequence[ScheduleAction]],
) -> Iterator[tuple[int, ScheduleAction, Result | None, Result | None]]:
    """Every action after all that it needs: its rank, the action, what it needs and what it leaves.

    Raises UsageError where the ranks wait for each other for ever.
    """
    places = placement(orders)
    stages = len(places)
    there: set[Result | None] = {None}
    waiting: dict[Result | None, list[int]] = {}
    position, runnable = [0] * len(orders), list(reversed(range(len(orders))))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            needed = needs(action, stages)
            if needed not in there:
                waiting.setdefault(needed, []).append(rank)
                break
            position[rank] += 1
            left = leaves(action)
            yield rank, action, needed, left
            there.add(left)
            runnable += waiting.pop(left, ())
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            raise UsageError(
                f"rank {rank} waits for ever at {order[position[rank]]}: what it needs comes later, or never",
                fix="put each action after the ones it depends on",
            )


def check(orders: Sequence[Sequence[ScheduleAction]]) -> None:
    """Raise UsageError unless the orders can be run, and every stage sees every micro-batch forward and back once."""
    seen: dict[tuple[int, int], str] = {}
    for _, (kind, stage, part), _, _ in walk(orders):
        seen[stage, part] = seen.get((stage, part), "") + kind
    parts = {part for _, part in seen}
    for stage in range(len(placement(orders))):
        for part in parts:
            if (passes := seen.get((stage, part), "")) not in ("FB", "FIW"):
                raise UsageError(
                    f"stage {stage} does {passes or 'nothing'} with micro-batch {part}", fix="make it F B, or F I W"
                )
