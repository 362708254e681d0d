"""A single save of a checkpoint: the order of the writes, and error messages for a failing disk."""

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from thrifty.core.atomic_files import NO_ROOM, AtomicFiles, FileDigest
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.training import checkpoint_index
from thrifty.training.checkpoint_manifest import MANIFEST, manifest_text, verify
from thrifty.training.rank_sync import SingleProcess
from thrifty.training.sharded_safetensors import Parts, stream

STATE = "state.json"
_ROOM_FOR_LISTS = 1 << 16  # bytes for the manifest, the hints and the folder itself

P, R = ParamSpec("P"), TypeVar("R")


def tensor_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("tensors*.safetensors"))


def _explained(
    method: Callable[Concatenate["CheckpointWriter", P], R],
) -> Callable[Concatenate["CheckpointWriter", P], R]:
    @wraps(method)
    def run(attempt: "CheckpointWriter", *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(attempt, *args, **kwargs)
        except OSError as error:
            raise attempt.explain(error) from error

    return run


@dataclass
class CheckpointWriter:
    """The steps of one save, in the order of the methods. `write_pieces` runs on all ranks, the other methods on rank
    0."""

    folder: Path
    step: int
    needed: int
    """Bytes of all tensors and the state."""
    files: AtomicFiles
    name: str = ""
    """Name of the temporary folder, the same on all ranks."""

    @property
    def aside(self) -> Path:
        return self.folder / self.name

    @_explained
    def begin(self) -> str:
        """Create the temporary folder and return its name. Raise ThriftyError if the disk has too little free space."""
        self.files.make_folders(self.folder)
        checkpoint_index.remove_leftovers(self.folder, self.files)
        free, needed = self.files.free_bytes(self.folder), self.needed + _ROOM_FOR_LISTS
        if free < needed:
            raise self._no_room(f"it needs {needed:,} bytes and {free:,} are free", needed - free)
        self.name = checkpoint_index.partial_name(self.step)
        self.files.make_folder(self.aside)
        return self.name

    @_explained
    def write_pieces(self, tensors: dict[str, torch.Tensor], parts: Parts, ranks: SingleProcess) -> dict[str, Any]:
        """Write the tensor parts of this rank. Return length and sha256 of the written file, by file name; {} if this
        rank writes no file."""
        if not parts and ranks.rank > 0:
            return {}
        name = "tensors.safetensors"
        if ranks.size > 1:
            name = f"tensors-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors"
        written = self.files.write_file(self.aside / name, stream(tensors, parts))
        return {name: [written.bytes, written.sha256]}

    @_explained
    def commit(self, state: bytes, pieces: list[dict[str, Any]]) -> list[Any]:
        """Write the manifest, verify the files, and rename the folder. Return the name and the bytes of the
        checkpoint."""
        written = {name: FileDigest(*facts) for piece in pieces for name, facts in piece.items()}
        written[STATE] = self.files.write_file(self.aside / STATE, [state])
        self.files.write_file(self.aside / MANIFEST, [manifest_text(self.step, len(pieces), written).encode()])
        self.files.sync_folder(self.aside)
        try:
            verify(self.aside)
        except IntegrityError as error:
            what = f"the disk returned other bytes than were written for step {self.step}: {error.what}"
            fix = "check the disk; or use another disk; all earlier checkpoints are kept"
            raise IntegrityError(what, fix) from error
        name = checkpoint_index.free_name(self.folder, self.step)
        self.files.rename(self.aside, self.folder / name)
        self.files.sync_folder(self.folder)
        return [name, sum(file.bytes for file in written.values())]

    @_explained
    def finish(self, name: str, best: bool, keep: int, also: Collection[int] = ()) -> list[str]:
        """Point LATEST (and BEST if `best`) to the new checkpoint. Remove old checkpoints and return notices."""
        for hint in (checkpoint_index.LATEST, checkpoint_index.BEST) if best else (checkpoint_index.LATEST,):
            self.files.swap_text(self.folder / hint, name + "\n")
        return checkpoint_index.remove_old(self.folder / name, keep, self.files, also)

    def discard(self) -> None:
        """Remove the temporary folder. The next save removes files that cannot be removed now."""
        with suppress(OSError):
            if self.aside.is_dir():
                self.files.remove_tree(self.aside)

    def explain(self, error: OSError) -> ThriftyError:
        if error.errno not in NO_ROOM:
            what = f"saving step {self.step} in {self.folder} failed: {error.strerror or error}"
            return ThriftyError(what, "all earlier checkpoints are kept: repair the disk, then `thrifty resume`")
        written = sum(file.stat().st_size for file in self.aside.glob("*")) if self.name else 0
        needed, free = self.needed + _ROOM_FOR_LISTS - written, self.files.free_bytes(self.folder)
        if free >= needed:
            return self._no_room(f"{free:,} bytes are free, but a quota or a limit on file sizes is reached", needed)
        return self._no_room(f"the save requires {needed:,} more bytes and {free:,} are free", needed - free)

    def _no_room(self, why: str, missing: int) -> ThriftyError:
        return ThriftyError(
            f"the disk is full: step {self.step} could not be saved in {self.folder}: {why}; {missing:,} bytes missing",
            f"free at least {missing:,} bytes there; or move the run to another disk; then `thrifty resume`; "
            "all earlier checkpoints are kept",
        )
