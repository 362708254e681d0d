"""What ended a run on several ranks: one verdict, the same on all of them."""

import json
import os
from dataclasses import asdict, dataclass

import torch.distributed as dist

from thrifty.core.errors import ThriftyError


class LostContact(ThriftyError):
    """A collective failed, which says nothing of whose fault it is."""


@dataclass(frozen=True)
class FailureVerdict:
    rank: int
    """Whose fault it is."""
    text: str
    exit_code: int = 1
    silent: bool = False
    """Whether that rank has nothing to say of it, as when it was asked to stop."""
    kill: str = ""
    """The process that will not end by itself, as JSON, if there is one."""

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
    """Whether an error only says that other ranks cannot be reached. gloo's errors are plain RuntimeErrors."""
    if isinstance(error, LostContact | dist.DistError):
        return True
    return type(error) is RuntimeError and any(name in str(error) for name in ("gloo", "Gloo", "NCCL"))


def restarts() -> tuple[int, int]:
    """How often torchrun has started the ranks again, and how often at most."""
    done, most = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return done, most


def restart_advice() -> str:
    """What comes next, by how torchrun was told to restart."""
    done, most = restarts()
    if done < most:
        return f"torchrun starts the ranks again from the last checkpoint ({done + 1} of at most {most} times)"
    return "go on from the last checkpoint: `thrifty resume`, under torchrun as before"
