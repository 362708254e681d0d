"""Synchronized calls on ranks: every rank receives every rank's result, or every rank raises the same error.

A save or a load has a few phases. Each phase is one call of `gather_or_raise` or `run_first`, with exactly one
collective. A rank that fails in a phase still joins the collective and reports the error as its result. The other ranks
therefore neither hang nor continue alone. Ranks exchange JSON in a tensor of bytes, never pickled objects.
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
    """One process without collectives: errors are raised unchanged."""

    rank, size = 0, 1

    def gather_or_raise(self, work: Callable[[], Any]) -> list[Any]:
        """Call `work` on every rank and return the results in order of rank. Results must be JSON values."""
        return [work()]

    def run_first(self, work: Callable[[], Any]) -> Any:
        """Call `work` on rank 0 and return its result on every rank."""
        return work()


class ProcessGroupSync(SingleProcess):
    """The ranks of a process group (by default all), which must all make the same calls in the same order."""

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
            return gather_bytes(message, self.group, self.device)  # JSON ignores trailing padding
        except RuntimeError as error:
            what = f"rank {self.rank} lost contact with the other ranks: {str(error).splitlines()[0]}"
            raise LostContact(what, "see the first error printed by any rank, then `thrifty resume`") from error


def process_group_sync() -> SingleProcess:
    """Return the synchronization over all ranks, or a SingleProcess without a process group."""
    return ProcessGroupSync() if ranks() > 1 else SingleProcess()


def _described(error: Exception) -> dict[str, str]:
    if isinstance(error, ThriftyError):
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        return {"kind": kind, "what": error.what, "fix": error.fix}
    return {"kind": "ThriftyError", "what": f"{type(error).__name__}: {error}", "fix": ""}
