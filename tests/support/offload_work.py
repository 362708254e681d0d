"""Work of each rank in tests of offloading, in a module that a new process can import."""

from typing import Any

import torch
from parallel_work import digests
from tensor_work import laid
from tiny_runs import advance, losses, plain_run, run_through, snapshot, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError

STEPS = 4


def differences(strategy: str, offload: tuple[str, dict[str, Any]], others: list[list[str]]) -> list[str]:
    """Return the other techniques with which an offloaded run on these ranks is not bit-identical."""
    name, settings = offload
    found = []
    for names in others:
        plain = plain_run(style="gpt", dropout=0.3)
        chosen = with_optimizer([technique(strategy), *map(technique, names)])
        runs = []
        for given in (chosen, [technique(name, **settings), *chosen]):
            torch._dynamo.reset()
            records, state = run_through(plain, given, STEPS)
            runs.append((losses(records), digests(snapshot(state).tensors)))
        if runs[0] != runs[1]:
            found.append(" and ".join(names) or "alone")
    return found


def differences_of_slices(tiers: list[str], others: dict[str, dict[str, Any]]) -> list[str]:
    """Return techniques and tiers for which offload changes a bit of a run whose fused layers are sharded slice by
    slice.
    """
    found = []
    for name, settings in others.items():
        chosen = with_optimizer([technique("parallelism.tensor"), technique(name, **settings)])
        offloads = [technique("memory.offload_optimizer", to=tier) for tier in tiers]
        runs = []
        for more in ([], *([offload] for offload in offloads)):
            with laid(tensor=2):
                records, state = run_through(plain_run(depth=1, style="gpt"), [*more, *chosen], STEPS)
                runs.append((losses(records), digests(snapshot(state).tensors)))
        found += [f"{name} on {tier}" for tier, run in zip(tiers, runs[1:], strict=True) if run != runs[0]]
    return found


def refusal(strategy: str, offload: tuple[str, dict[str, Any]], other: str) -> str:
    name, settings = offload
    run = compose(
        plain_run(), with_optimizer([technique(strategy), technique(name, **settings), technique(other)]), STEPS
    )
    try:
        advance(run, run.start())
    except RefusedError as refused:
        return refused.what
    return ""
