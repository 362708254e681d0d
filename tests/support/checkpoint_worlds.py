"""States, and disks that fail on purpose, shared by the checkpoint tests."""

import errno
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from thrifty.core.atomic_files import AtomicFiles
from thrifty.training.checkpoint import STATE, save
from thrifty.training.checkpoint_manifest import _sealed


class Crash(BaseException):
    """The end of the process, as far as the code under test can tell."""


@dataclass
class FailingDisk(AtomicFiles):
    """Counts every change of the file system; change number `at`, and all after it, fail in the chosen way.

    A write that fails has written half of its bytes, as a torn write or a full disk would. On a full disk, removing
    and renaming still work.
    """

    at: int | None = None
    how: Literal["crash", "full", "broken"] = "crash"
    done: list[str] = field(default_factory=list)

    def _may_do(self, change: str) -> None:
        self.done.append(change)
        if self.at is None or len(self.done) <= self.at:
            return
        if self.how == "crash":
            raise Crash(change)
        if self.how == "broken":
            raise OSError(errno.EIO, "Input/output error")
        if change in ("make folder", "create file", "write"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def make_folder(self, path: Path) -> None:
        self._may_do("make folder")
        super().make_folder(path)

    def create_file(self, path: Path) -> int:
        self._may_do("create file")
        return super().create_file(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        try:
            self._may_do("write")
        except BaseException:
            super().write(descriptor, data[: len(data) // 2])
            raise
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._may_do("sync")  # counted, not done: only a power cut could tell, and it takes most of the time

    def rename(self, source: Path, target: Path) -> None:
        self._may_do("rename")
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        self._may_do("remove file")
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self._may_do("remove folder")
        super().remove_folder(path)


def state_of(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A small state that differs everywhere from the state of any other seed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "parameters/blocks.0.weight": torch.randn(7, 5, generator=generator),
        "optimizer/mean/blocks.0.weight": torch.randn(7, 5, generator=generator).bfloat16(),
        "techniques/sparsity.rigl/blocks.0.weight": torch.randn(7, 5, generator=generator) > 0,
    }
    return tensors, {"seed": seed, "log": [{"step": seed, "decision": {"ratio": 0.1 * seed}}]}


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit: names, dtypes, shapes and values, also of nan and of negative zero."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert bits(found) == bits(tensor), name


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_without_end(folder: Path, start: int, acknowledged: Any) -> None:
    """Saves step after step; `acknowledged` (a shared integer) is the last step whose save returned."""
    torch.set_num_threads(1)
    for step in range(start, start + 1_000_000):
        save(folder, step, *state_of(step), best=step % 5 == 0)
        acknowledged.value = step


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Change what a manifest says, None removing it, under a seal that is right."""
    facts = json.loads((checkpoint / "manifest.json").read_text()) | changes
    facts.pop("seal")
    kept = {name: value for name, value in facts.items() if value is not None}
    (checkpoint / "manifest.json").write_text(_sealed(kept))


def replace_state(checkpoint: Path, state: bytes) -> None:
    """Give a checkpoint other scalars, which its manifest lists."""
    (checkpoint / STATE).write_bytes(state)
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    listed = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    reseal(checkpoint, files=files | {STATE: listed})
