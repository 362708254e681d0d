"""Ranks that act as one: every rank learns every rank's result, or every rank raises the same error.

A save or a load is a few phases; each phase is one call of `gather_or_raise` or `run_first`, and each holds exactly one
collective. A rank that fails inside a phase still takes part in it and reports its error as the result, so the others
neither hang nor go on alone. What travels is JSON in a tensor of bytes, never a pickled object.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from thrifty.core.errors import InfeasibleError, IntegrityError, ThriftyError, UsageError
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.core.ranks import gather_bytes, ranks
from thrifty.training.failure_verdict import LostContact

_KINDS = {kind.__name__: kind for kind in (ThriftyError, UsageError, InfeasibleError, IntegrityError)}


class SingleProcess:
    """One process, no collectives: an error leaves as it is."""

    rank, size = 0, 1

    def gather_or_raise(self, work: Callable[[], Any]) -> list[Any]:
        """Every rank does `work`; the results of all ranks in order of rank. Results must be JSON values."""
        return [work()]

    def run_first(self, work: Callable[[], Any]) -> Any:
        """Rank 0 does `work`; every rank gets its result."""
        return work()


class ProcessGroupSync(SingleProcess):
    """The ranks of a process group (all of them by default), which must all make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        on_cpu = "gloo" in dist.get_backend(group) or "cpu:" in str(dist.get_backend_config(group))
        self.device = torch.device("cpu") if on_cpu else torch.device(torch.accelerator.current_accelerator() or "cpu")

    def gather_or_raise(self, work: Callable[[], Any]) -> list[Any]:
        failure: Exception | None = None
        try:
            with explain_out_of_memory():
                report = json.dumps({"value": work()})
        except Exception as error:  # reported to all ranks below, and raised there
            failure, report = error, json.dumps(_described(error))
        reports = [json.loads(text) for text in self._gather(report.encode())]
        for rank, answer in enumerate(reports):
            if "value" not in answer:
                raise _KINDS[answer["kind"]](f"rank {rank}: {answer['what']}", answer["fix"]) from failure
        return [answer["value"] for answer in reports]

    def run_first(self, work: Callable[[], Any]) -> Any:
        return self.gather_or_raise(work if self.rank == 0 else lambda: None)[0]

    def _gather(self, message: bytes) -> list[bytes]:
        try:
            return gather_bytes(message, self.group, self.device)  # blanks behind it are nothing to JSON
        except RuntimeError as error:
            what = f"rank {self.rank} lost contact with the other ranks: {str(error).splitlines()[0]}"
            raise LostContact(what, "look at the first error printed by any rank, then `thrifty resume`") from error


def process_group_sync() -> SingleProcess:
    """All ranks of this process's group; this process alone where it has none."""
    return ProcessGroupSync() if ranks() > 1 else SingleProcess()


def _described(error: Exception) -> dict[str, str]:
    if isinstance(error, ThriftyError):
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        return {"kind": kind, "what": error.what, "fix": error.fix}
    return {"kind": "ThriftyError", "what": f"{type(error).__name__}: {error}", "fix": ""}
