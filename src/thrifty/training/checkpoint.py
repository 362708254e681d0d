"""Checkpoints that survive a crash, a full disk or a flipped bit.

A save writes `step-00000200.partial-<id>/`: tensors as safetensors, then `state.json`, each file flushed. The manifest,
written last, has the length and sha256 of every file. The save reads all files back and compares them with the
manifest. It then renames the folder to `step-00000200`, updates `LATEST` and `BEST`, and removes older checkpoints.

A folder named `step-<number>` is therefore always complete. A load verifies the manifest. It moves a damaged checkpoint
to `quarantine/` and uses the previous checkpoint. `LATEST` is only a hint.

Several ranks save into one folder. Each rank writes the tensor parts that no lower rank holds. Rank 0 makes all
decisions, and an error on one rank is raised on all. Any number of ranks can load a checkpoint. `folder` is always the
`checkpoints` folder of a run, on a disk that all ranks can read. Only one process, or one group of ranks, may write it
at a time.
"""

import errno
import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thrifty.core.atomic_files import AtomicFiles, refuse_links
from thrifty.core.errors import IntegrityError, ThriftyError, UsageError
from thrifty.core.old_names import rename_scalars
from thrifty.core.shard_layout import LocalShard
from thrifty.training import checkpoint_index
from thrifty.training.checkpoint_index import CheckpointChoice
from thrifty.training.checkpoint_manifest import verify
from thrifty.training.checkpoint_writer import STATE, CheckpointWriter, tensor_files
from thrifty.training.rank_sync import SingleProcess
from thrifty.training.sharded_safetensors import Parts, StoredTensorBoxes, local_parts, local_values, stored_bytes

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SaveReport:
    """Size and duration of a save. `bytes` is the sum over all ranks. `seconds` includes verification and the removal
    of old checkpoints."""

    path: Path
    bytes: int
    seconds: float
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundCheckpoint:
    """A verified checkpoint whose tensors are not read yet. `notices` report damaged newer checkpoints."""

    step: int
    scalars: dict[str, Any]
    path: Path
    notices: list[str]


@dataclass(frozen=True)
class LoadedCheckpoint(FoundCheckpoint):
    tensors: Tensors


def save(
    folder: Path,
    step: int,
    tensors: Tensors,
    scalars: dict[str, Any],
    *,
    files: AtomicFiles | None = None,
    best: bool = False,
    keep: int = 2,
    also: Collection[int] = (),
    ranks: SingleProcess | None = None,
) -> SaveReport:
    """Save a state. After the call returns, only the loss of the disk can destroy the saved state.

    Keep the newest `keep` verified checkpoints, the last checkpoint saved as `best`, and checkpoints of the steps in
    `also`. With `ranks=ProcessGroupSync()` all ranks must call `save`. `tensors` are DTensors or equal on all ranks;
    `scalars` are taken from rank 0.

    Raise ThriftyError if the disk is full or fails. Raise UsageError for a state that safetensors or JSON cannot store.
    Earlier checkpoints remain in every case.
    """
    started, files, ranks = time.monotonic(), files or AtomicFiles(), ranks or SingleProcess()
    if keep < 1:
        raise UsageError(f"keep is {keep}: a run keeps at least 1 checkpoint", "--set checkpoints.keep=1")
    own_parts = _share(tensors, ranks)
    state = ranks.run_first(lambda: _as_json(scalars)).encode()
    needed = len(state) + sum(ranks.gather_or_raise(lambda: stored_bytes(tensors, own_parts)))
    writer = CheckpointWriter(folder, step, needed, files)
    writer.name = ranks.run_first(writer.begin)
    try:
        written = ranks.gather_or_raise(lambda: writer.write_pieces(tensors, own_parts, ranks))
        name, size = ranks.run_first(lambda: writer.commit(state, written))
    except Exception:
        if ranks.rank == 0:
            writer.discard()
        raise
    notices = ranks.run_first(lambda: writer.finish(name, best, keep, also))
    return SaveReport(folder / name, size, time.monotonic() - started, tuple(notices))


def load(folder: Path, step: CheckpointChoice | None = None, *, files: AtomicFiles | None = None) -> LoadedCheckpoint:
    """Return the newest undamaged checkpoint, or the checkpoint of `step`, with whole, plain tensors. Damaged
    checkpoints are moved to `quarantine/` and named in `notices`. Raise IntegrityError if no checkpoint is left. Raise
    UsageError for a pickle; pickles are never opened."""
    checkpoint = find(folder, step, files=files)
    stored = StoredTensorBoxes(tensor_files(checkpoint.path))
    tensors = {name: stored.full(name) for name in stored.pieces}
    return LoadedCheckpoint(checkpoint.step, checkpoint.scalars, checkpoint.path, checkpoint.notices, tensors)


def find(
    folder: Path,
    step: CheckpointChoice | None = None,
    *,
    files: AtomicFiles | None = None,
    ranks: SingleProcess | None = None,
) -> FoundCheckpoint:
    """Return the newest undamaged checkpoint, or the checkpoint of `step`, without its tensors; `fill` reads the
    tensors. Rank 0 chooses the checkpoint as `load` does, and every rank receives this choice."""
    facts = (ranks or SingleProcess()).run_first(lambda: _choose(folder, step, files or AtomicFiles()))
    return FoundCheckpoint(facts["step"], facts["scalars"], folder / facts["name"], facts["notices"])


def find_of_run(folder: Path, step: int | None = None, *, ranks: SingleProcess | None = None) -> FoundCheckpoint:
    """Return the checkpoint as `find` does. Raise IntegrityError if the checkpoint lacks the recipe, data or steps of
    its run."""
    saved = find(folder, step, ranks=ranks)
    kinds = {"recipe": dict, "data": dict, "steps": int}
    if lacking := [name for name, kind in kinds.items() if not isinstance(saved.scalars.get(name), kind)]:
        raise IntegrityError(
            f"'{saved.path}' lacks the {' and the '.join(lacking)} of its run",
            fix="restore the checkpoint from a backup; or remove it, so that the previous checkpoint is used",
        )
    return saved


def fill(
    checkpoint: FoundCheckpoint,
    into: Tensors,
    *,
    ranks: SingleProcess | None = None,
    besides: Collection[str] = (),
) -> None:
    """Copy the tensors of a checkpoint into `into`, in place; its tensors may be plain or DTensors. Each rank reads
    only the parts that its shards require. `besides` are names of tensors that the caller reads itself. Raise
    UsageError, before any change, if names (over all ranks), shapes or dtypes differ from the checkpoint."""
    ranks = ranks or SingleProcess()
    stored = StoredTensorBoxes(tensor_files(checkpoint.path))
    wanted = set().union(*ranks.gather_or_raise(lambda: [*into, *besides]))
    ranks.gather_or_raise(lambda: _refuse_other(checkpoint.path, stored, into, wanted))
    ranks.gather_or_raise(lambda: _fill(stored, into))


def _share(tensors: Tensors, ranks: SingleProcess) -> Parts:
    """Return the tensor parts that this rank writes: parts that it holds and no lower rank holds."""

    def all_parts() -> dict[str, Any]:
        parts = local_parts(tensors)
        counts = {name: sum(part.box.numel for part in own) for name, own in parts.items()}
        if ranks.size == 1 and any(counts[name] < tensor.numel() for name, tensor in tensors.items()):
            raise UsageError(
                "a sharded state cannot be saved by one rank", "call save with ranks=process_group_sync() on all ranks"
            )
        return {name: [_box_of(part) for part in own] for name, own in parts.items()}

    earlier = ranks.gather_or_raise(all_parts)[: ranks.rank]
    own_parts = {}
    for name, own in local_parts(tensors).items():
        written_before = [part for rank_parts in earlier for part in rank_parts.get(name, ())]
        is_empty = not tensors[name].numel()
        if new := [part for part in own if _box_of(part) not in written_before and (part.box.numel or is_empty)]:
            own_parts[name] = new
    return own_parts


def _box_of(part: LocalShard) -> list[list[int]]:
    return [list(part.box.offset), list(part.box.shape)]


def _as_json(scalars: dict[str, Any]) -> str:
    """Return JSON that parses to the same values. Non-finite numbers are written as Python's `NaN` and `Infinity`."""
    for name, value in scalars.items():
        try:
            same = repr(json.loads(json.dumps(value))) == repr(value) and isinstance(name, str)
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            what = f"JSON changes the value of the state {name!r}: {value!r:.200}"
            raise UsageError(what, "use dict with text keys, list, str, int, float, bool and None; no tuples")
    return json.dumps(scalars, indent=1)


def _choose(folder: Path, choice: CheckpointChoice | None, files: AtomicFiles) -> dict[str, Any]:
    checkpoint_index.refuse_foreign(folder)
    refuse_links(folder)
    step = checkpoint_index.chosen_step(folder, choice)
    damaged: list[tuple[Path, str]] = []
    for path in reversed(checkpoint_index.checkpoints(folder)):
        if step is not None and checkpoint_index.step_of(path) != step:
            continue
        try:
            verify(path)
            scalars = rename_scalars({**json.loads((path / STATE).read_bytes())})
        except IntegrityError as error:
            damaged.append((path, error.what))
            continue
        except (ValueError, TypeError, RecursionError):
            damaged.append((path, f"{STATE} contains no state"))
            continue
        except OSError as error:
            if not path.is_dir():  # a running training has just removed it
                continue
            if error.errno not in (errno.EIO, errno.ENOENT):
                fix = "check the permissions of the folder, and the disk"
                raise ThriftyError(f"'{path}' could not be read: {error.strerror}", fix) from error
            damaged.append((path, str(error.strerror)))
            continue
        notices = [checkpoint_index.set_aside(bad, reason, files) for bad, reason in damaged]
        return {"step": checkpoint_index.step_of(path), "scalars": scalars, "name": path.name, "notices": notices}
    raise _none_left(folder, step, damaged)


def _none_left(folder: Path, step: int | None, damaged: list[tuple[Path, str]]) -> IntegrityError:
    """Return the error for a folder without an undamaged checkpoint. Damaged checkpoints are not moved, so the next
    load reports the same error."""
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
        what = f"no undamaged {wanted} is left in '{folder}' ({reasons})"
        return IntegrityError(what, "restore the folder from a backup; or start the run again")
    others = ", ".join(str(checkpoint_index.step_of(path)) for path in checkpoint_index.checkpoints(folder))
    fix = f"choose one of the steps {others}" if others else "the run ended before its first save: start it again"
    return IntegrityError(f"there is no {wanted} in '{folder}'", fix)


def _refuse_other(checkpoint: Path, stored: StoredTensorBoxes, into: Tensors, wanted: Collection[str]) -> None:
    """Raise UsageError if names, dtypes or shapes differ from the checkpoint; `wanted` are the names on all ranks."""
    for name in sorted(into.keys() | stored.pieces.keys() - wanted):
        there = stored.describe(name) if name in stored.pieces else "absent"
        here = f"{into[name].dtype} {tuple(into[name].shape)}" if name in into else "absent"
        if there != here:
            what = f"'{checkpoint}' does not fit this run: {name!r} is {there} in the checkpoint and {here} here"
            raise UsageError(what, "resume with the recipe that the checkpoint was written with")


def _fill(stored: StoredTensorBoxes, into: Tensors) -> None:
    parts = local_parts(into)
    with torch.no_grad():
        for name, tensor in into.items():
            values = local_values(tensor)
            for part in parts[name]:
                stored.read(name, part.box, values[part.place])
