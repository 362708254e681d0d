"""A pipeline whose computing is sleep, run by real ranks; here, so that a fresh process can import it."""

import time

import torch
import torch.distributed as dist

from thrifty.simulators.cluster.pipeline_schedules import Result, ScheduleAction, leaves, needs, placement, schedule

Seconds = dict[tuple[str, int], float]
"""Seconds of an action by its kind and stage."""
Case = tuple[str, int, int, Seconds]
"""A schedule by name, with so many micro-batches and chunks."""
Times = list[tuple[float, float]]
"""Start and end of each of a rank's actions, on the clock that all processes share."""


def run_each(cases: list[Case], repeats: int) -> list[list[Times]]:
    """Return the actions of this rank with their times, for each repeat of each case."""
    found = []
    for name, parts, chunks, seconds in cases:
        orders = schedule(name, dist.get_world_size(), parts, chunks)
        found.append([_once(orders[dist.get_rank()], placement(orders), seconds) for _ in range(repeats)])
    return found


def _once(order: list[ScheduleAction], places: list[int], seconds: Seconds) -> Times:
    rank, times, sending = dist.get_rank(), [], []
    dist.barrier()
    for action in order:
        needed = needs(action, len(places))
        if needed and (source := places[needed[1]]) != rank:
            dist.recv(torch.empty(16), source, tag=_tag(needed))
        start = time.monotonic()
        time.sleep(seconds[action.kind, action.stage])
        times.append((start, time.monotonic()))
        left = leaves(action)
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        if left and 0 <= neighbour < len(places) and (target := places[neighbour]) != rank:
            message = torch.ones(16)
            sending.append((dist.isend(message, target, tag=_tag(left)), message))
    for request, _ in sending:
        request.wait()
    return times


def _tag(result: Result) -> int:
    what, stage, part = result
    return 2 * (1000 * stage + part) + (what == "gradient")
