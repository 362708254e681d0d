"""The verdict on a failed run: one cause, the same on all ranks."""

import json
import os
from dataclasses import asdict, dataclass

import torch.distributed as dist

from thrifty.core.errors import ThriftyError


class LostContact(ThriftyError):
    """Error of a failed collective, which does not identify the rank at fault."""


@dataclass(frozen=True)
class FailureVerdict:
    """The cause of a failed run."""

    rank: int
    """Rank at fault."""
    text: str
    exit_code: int = 1
    silent: bool = False
    """True if the rank at fault does not print the verdict, for example after SIGTERM."""
    kill: str = ""
    """JSON identity of a process that must be killed, or ""."""

    def as_error(self) -> ThriftyError:
        error = ThriftyError(self.text)
        error.exit_code = self.exit_code
        return error

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "FailureVerdict":
        return cls(**json.loads(text))


def lost_contact(error: BaseException) -> bool:
    """Return True if an error only reports that other ranks are unreachable. gloo raises plain RuntimeErrors."""
    if isinstance(error, LostContact | dist.DistError):
        return True
    return type(error) is RuntimeError and any(name in str(error) for name in ("gloo", "Gloo", "NCCL"))


def restarts() -> tuple[int, int]:
    """Return the number of torchrun's restarts, and the maximum number of restarts."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done, most


def restart_advice() -> str:
    """Return advice to the user: wait for torchrun's next restart, or resume."""
    done, most = restarts()
    if done < most:
        return f"torchrun restarts the ranks from the last checkpoint (restart {done + 1} of at most {most})"
    return "resume from the last checkpoint: `thrifty resume`, under torchrun as before"
