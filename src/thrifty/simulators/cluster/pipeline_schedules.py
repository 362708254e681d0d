"""Pipeline schedules as data: the ordered actions of each rank.

A model is cut into stages, and an effective batch into parts (micro-batches). The forward pass of a stage depends on
the previous stage, and the backward pass depends on the next stage. The backward pass may be split into the gradient of
the input and the gradient of the weights (Qi et al. 2023, arXiv 2401.10241). The previous stage waits only for the
gradient of the input."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from thrifty.core.errors import UsageError, refuse_unknown

Kind = Literal["F", "B", "I", "W"]


class ScheduleAction(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: Kind
    """F: forward. B: whole backward. I: gradient of the input only. W: gradient of the weights only, after I."""
    stage: int
    """Index of the stage along the model, over all ranks and chunks."""
    part: int
    """Index of the micro-batch."""


Order = list[ScheduleAction]


def schedule(name: str, ranks: int, parts: int, chunks: int = 1) -> list[Order]:
    """Return the ordered actions of each pipeline rank for `parts` micro-batches.

    `chunks` is the number of stages per rank. "interleaved" allows any number (stage s is on rank s mod ranks).
    "zero_bubble_v" requires 2 (stages r and 2 · ranks - 1 - r are on rank r). All other schedules require 1. Raises
    UsageError for sizes that the schedule does not support.
    """
    refuse_unknown("unknown pipeline schedule", name, _SCHEDULES)
    if min(ranks, parts, chunks) < 1:
        raise UsageError(
            f"there is no pipeline of {ranks} ranks, {parts} parts and {chunks} chunks", fix="use at least 1 of each"
        )
    required = {"interleaved": chunks, "zero_bubble_v": 2}.get(name, 1)
    if chunks != required:
        raise UsageError(
            f"the schedule {name!r} cannot have {chunks} stages per rank",
            fix=f"set chunks to {required}; or use interleaved",
        )
    return [_SCHEDULES[name](rank, ranks, parts, chunks) for rank in range(ranks)]


def _gpipe(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Return all forward passes, then all backward passes in reverse order (Huang et al. 2019).

    The newest activations are freed first."""
    forward = [ScheduleAction("F", rank, part) for part in range(parts)]
    return forward + [ScheduleAction("B", rank, part) for part in reversed(range(parts))]


def _one_forward_one_backward(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Return the schedule 1F1B, with the minimum number of live micro-batches that keeps all ranks busy. The schedule
    is also called PipeDream-Flush (Narayanan et al. 2021, arXiv 2006.09503).
    """
    forward = [ScheduleAction("F", rank, part) for part in range(parts)]
    return _interleave(forward, [[ScheduleAction("B", rank, part)] for part in range(parts)], ranks - rank - 1)


def _interleaved(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Return interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473).

    Each rank has several stages. Micro-batches run in rounds of `ranks`."""
    if parts % ranks:
        raise UsageError(
            f"the schedule 'interleaved' requires a multiple of {ranks} micro-batches, not {parts}",
            fix=f"use {parts - parts % ranks or ranks} micro-batches; or use the schedule 1f1b",
        )
    rounds = [range(start, start + ranks) for start in range(0, parts, ranks)]
    forward = [ScheduleAction("F", c * ranks + rank, part) for turn in rounds for c in range(chunks) for part in turn]
    backward = [
        ScheduleAction("B", c * ranks + rank, part) for turn in rounds for c in reversed(range(chunks)) for part in turn
    ]
    return _interleave(forward, [[action] for action in backward], 2 * (ranks - rank - 1) + (chunks - 1) * ranks)


def _zero_bubble(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Return ZB-H1 (Qi et al. 2023): 1F1B with weight gradients that are delayed more on later ranks.

    All ranks hold the same number of micro-batches and compute weight gradients at the end instead of waiting. If W
    takes no longer than F and I, as in Transformers without recompute, the bubble is (ranks - 1)(F + I - W) seconds
    (table 2). Otherwise the bubble is (ranks - 1) · max(F, I).
    """
    forward = [ScheduleAction("F", rank, part) for part in range(parts)]
    backward = [
        [ScheduleAction("I", rank, part)] + [ScheduleAction("W", rank, part - rank)] * (part >= rank)
        for part in range(parts)
    ]
    remaining = [ScheduleAction("W", rank, part) for part in range(max(parts - rank, 0), parts)]
    return _interleave(forward, backward, ranks - rank - 1) + remaining


def _zero_bubble_v(rank: int, ranks: int, parts: int, chunks: int) -> Order:
    """Return ZB-V (Qi et al. 2023, section 6).

    Stages are placed from the first rank to the last and back, so the first rank computes the loss. The order is built
    for at least 2 · ranks - 1 micro-batches. Extra micro-batches are then removed.
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


def _interleave(forward: Order, backward: Sequence[Order], ahead: int) -> Order:
    """Return `ahead` forward passes, then alternating forward and backward passes, then the last backward passes."""
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for position, after in enumerate(backward):
        order += [*forward[ahead + position : ahead + position + 1], *after]
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
"""Result of an action: ("output" or "gradient", stage, part)."""


def needs(action: ScheduleAction, stages: int) -> Result | None:
    """Return the result on which an action depends; None if the action depends only on the input of the model."""
    kind, stage, part = action
    if kind == "F":
        return ("output", stage - 1, part) if stage else None
    if kind == "W":
        return "gradient", stage, part
    return ("gradient", stage + 1, part) if stage + 1 < stages else ("output", stage, part)


def leaves(action: ScheduleAction) -> Result | None:
    """Return the result of an action; None for `W`, because no action depends on weight gradients."""
    kind, stage, part = action
    return None if kind == "W" else ("output" if kind == "F" else "gradient", stage, part)


def placement(orders: Sequence[Sequence[ScheduleAction]]) -> list[int]:
    """Return the rank of each stage. Raises UsageError if a stage is on two ranks or on no rank."""
    places: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for stage in {action.stage for action in order}:
            if places.setdefault(stage, rank) != rank:
                raise UsageError(
                    f"stage {stage} is on ranks {places[stage]} and {rank}", fix="place each stage on one rank"
                )
    if sorted(places) != list(range(len(places))):
        raise UsageError(f"the stages {sorted(places)} have gaps", fix="number stages from 0 without gaps")
    return [places[stage] for stage in range(len(places))]


def walk(
    orders: Sequence[Sequence[ScheduleAction]],
) -> Iterator[tuple[int, ScheduleAction, Result | None, Result | None]]:
    """Yield (rank, action, required result, own result) for each action, after all actions on which it depends.

    Raises UsageError if the orders deadlock.
    """
    places = placement(orders)
    stages = len(places)
    available: set[Result | None] = {None}
    waiting: dict[Result | None, list[int]] = {}
    position, runnable = [0] * len(orders), list(reversed(range(len(orders))))
    while runnable:
        rank = runnable.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            needed = needs(action, stages)
            if needed not in available:
                waiting.setdefault(needed, []).append(rank)
                break
            position[rank] += 1
            result = leaves(action)
            yield rank, action, needed, result
            available.add(result)
            runnable += waiting.pop(result, ())
    for rank, order in enumerate(orders):
        if position[rank] < len(order):
            raise UsageError(
                f"rank {rank} deadlocks at {order[position[rank]]}: its input is computed later or never",
                fix="order each action after the actions it depends on",
            )


def check(orders: Sequence[Sequence[ScheduleAction]]) -> None:
    """Raise UsageError unless each stage runs each micro-batch once forward and once backward, without deadlock."""
    seen: dict[tuple[int, int], str] = {}
    for _, (kind, stage, part), _, _ in walk(orders):
        seen[stage, part] = seen.get((stage, part), "") + kind
    parts = {part for _, part in seen}
    for stage in range(len(placement(orders))):
        for part in parts:
            if (passes := seen.get((stage, part), "")) not in ("FB", "FIW"):
                raise UsageError(
                    f"stage {stage} runs {passes or 'nothing'} on micro-batch {part}", fix="run F B, or F I W"
                )
