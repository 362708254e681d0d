"""Checkpoints that a crash, a full disk or a flipped bit cannot take away.

A save writes `step-00000200.partial-<id>/` (tensors as safetensors, then `state.json`), flushes each file, writes the
manifest with every file's length and sha256 last, reads everything back against it, and only then renames the folder to
`step-00000200`. `LATEST` and `BEST` are swapped next, older checkpoints go at the very end. So whatever moment is the
last one, a folder named `step-<number>` is complete; and since nothing is believed without its manifest, what decays
later is found, moved to `quarantine/`, and the checkpoint before it is used. `LATEST` is only a hint.

Several ranks save into one folder, each the pieces that no earlier rank holds; rank 0 decides, all follow, and an error
on one is raised on all. How many ranks wrote a checkpoint does not matter to those who read it. `folder` is always a
run's `checkpoints` folder, on a disk that all ranks see; one process, or one group of ranks, may write it at a time.
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
from thrifty.training.checkpoint_manifest import verify
from thrifty.training.checkpoint_writer import STATE, CheckpointWriter, tensor_files
from thrifty.training.rank_sync import SingleProcess
from thrifty.training.sharded_safetensors import Parts, StoredTensorBoxes, local_parts, local_values, stored_bytes

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SaveReport:
    """`bytes` over all ranks; `seconds` until all was on the disk, read back, and the old checkpoints gone."""

    path: Path
    bytes: int
    seconds: float
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that verified, its tensors not yet read; `notices` say what was wrong with newer ones."""

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
    """Saves a state; once it returns, the state survives anything but the loss of the disk.

    Keeps `keep` verified checkpoints in all, the last one saved as `best`, and those of the steps in `also`. With
    `ranks=ProcessGroupSync()` all ranks call it; `tensors` are DTensors or equal on all ranks, `scalars` are rank 0's.
    Raises `ThriftyError` when it does not fit or the disk fails, `UsageError` for a state that cannot be stored;
    earlier checkpoints remain in every case.
    """
    started, files, ranks = time.monotonic(), files or AtomicFiles(), ranks or SingleProcess()
    if keep < 1:
        raise UsageError(f"cannot keep {keep} checkpoints", "keep at least 1")
    mine = _share(tensors, ranks)
    state = ranks.run_first(lambda: _as_json(scalars)).encode()
    needed = len(state) + sum(ranks.gather_or_raise(lambda: stored_bytes(tensors, mine)))
    attempt = CheckpointWriter(folder, step, needed, files)
    attempt.name = ranks.run_first(attempt.begin)
    try:
        written = ranks.gather_or_raise(lambda: attempt.write_pieces(tensors, mine, ranks))
        name, size = ranks.run_first(lambda: attempt.commit(state, written))
    except Exception:
        if ranks.rank == 0:
            attempt.discard()
        raise
    notices = ranks.run_first(lambda: attempt.finish(name, best, keep, also))
    return SaveReport(folder / name, size, time.monotonic() - started, tuple(notices))


def load(folder: Path, step: int | None = None, *, files: AtomicFiles | None = None) -> LoadedCheckpoint:
    """The newest undamaged checkpoint (of `step`, if given), whole and in plain tensors, whoever wrote it.

    A damaged one is set aside and named in `notices`. Raises `IntegrityError` when none is left, `UsageError` when
    handed a pickle, which is never opened.
    """
    checkpoint = find(folder, step, files=files)
    stored = StoredTensorBoxes(tensor_files(checkpoint.path))
    tensors = {name: stored.full(name) for name in stored.pieces}
    return LoadedCheckpoint(checkpoint.step, checkpoint.scalars, checkpoint.path, checkpoint.notices, tensors)


def find(
    folder: Path, step: int | None = None, *, files: AtomicFiles | None = None, ranks: SingleProcess | None = None
) -> FoundCheckpoint:
    """The first half of a load: which checkpoint, and its scalars, from which the tensors to `fill` can be built.

    Rank 0 chooses as `load` does, and every rank gets its choice.
    """
    facts = (ranks or SingleProcess()).run_first(lambda: _choose(folder, step, files or AtomicFiles()))
    return FoundCheckpoint(facts["step"], facts["scalars"], folder / facts["name"], facts["notices"])


def find_of_run(folder: Path, step: int | None = None, *, ranks: SingleProcess | None = None) -> FoundCheckpoint:
    """Do as `find`. Raises `IntegrityError` if the checkpoint does not hold the recipe, data and steps of its run."""
    saved = find(folder, step, ranks=ranks)
    kinds = {"recipe": dict, "data": dict, "steps": int}
    if lacking := [name for name, kind in kinds.items() if not isinstance(saved.scalars.get(name), kind)]:
        raise IntegrityError(
            f"{saved.path} does not say the {' and the '.join(lacking)} of its run",
            fix="bring the checkpoint back from a copy, or remove it to use the one before it",
        )
    return saved


def fill(
    checkpoint: FoundCheckpoint,
    into: Tensors,
    *,
    ranks: SingleProcess | None = None,
    besides: Collection[str] = (),
) -> None:
    """The second half of a load: the values of every tensor in `into`, plain or DTensor, in place.

    Each rank reads only what its shards need. Raises `UsageError` before anything is changed if the names of all ranks
    together, those that the caller reads `besides` included, shapes or dtypes are not exactly those of the checkpoint.
    """
    ranks = ranks or SingleProcess()
    stored = StoredTensorBoxes(tensor_files(checkpoint.path))
    wanted = set().union(*ranks.gather_or_raise(lambda: [*into, *besides]))
    ranks.gather_or_raise(lambda: _refuse_other(checkpoint.path, stored, into, wanted))
    ranks.gather_or_raise(lambda: _fill(stored, into))


def _share(tensors: Tensors, ranks: SingleProcess) -> Parts:
    """What this rank writes: its parts of each tensor, unless an earlier rank holds the same."""

    def offered() -> dict[str, Any]:
        parts = local_parts(tensors)
        counts = {name: sum(part.box.numel for part in own) for name, own in parts.items()}
        if ranks.size == 1 and any(counts[name] < tensor.numel() for name, tensor in tensors.items()):
            raise UsageError(
                "a sharded state cannot be saved by one rank", "save it with ranks=process_group_sync() on all"
            )
        return {name: [_where(part) for part in own] for name, own in parts.items()}

    earlier = ranks.gather_or_raise(offered)[: ranks.rank]
    mine = {}
    for name, own in local_parts(tensors).items():
        taken = [part for theirs in earlier for part in theirs.get(name, ())]
        is_empty = not tensors[name].numel()
        if new := [part for part in own if _where(part) not in taken and (part.box.numel or is_empty)]:
            mine[name] = new
    return mine


def _where(part: LocalShard) -> list[list[int]]:
    return [list(part.box.offset), list(part.box.shape)]


def _as_json(scalars: dict[str, Any]) -> str:
    """JSON that reads back as the very same value (non-finite numbers in Python's spelling)."""
    for name, value in scalars.items():
        try:
            same = repr(json.loads(json.dumps(value))) == repr(value) and isinstance(name, str)
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            what = f"the state {name!r} would not come back from JSON as it is: {value!r:.200}"
            raise UsageError(what, "use dict with text keys, list, str, int, float, bool and None; no tuples")
    return json.dumps(scalars, indent=1)


def _choose(folder: Path, step: int | None, files: AtomicFiles) -> dict[str, Any]:
    checkpoint_index.refuse_foreign(folder)
    refuse_links(folder)
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
            damaged.append((path, f"{STATE} holds no state"))
            continue
        except OSError as error:
            if not path.is_dir():  # a running training has just removed it
                continue
            if error.errno not in (errno.EIO, errno.ENOENT):
                raise ThriftyError(f"{path} could not be read: {error.strerror}", "mend its permissions") from error
            damaged.append((path, str(error.strerror)))
            continue
        notices = [checkpoint_index.set_aside(bad, reason, files) for bad, reason in damaged]
        return {"step": checkpoint_index.step_of(path), "scalars": scalars, "name": path.name, "notices": notices}
    raise _none_left(folder, step, damaged)


def _none_left(folder: Path, step: int | None, damaged: list[tuple[Path, str]]) -> IntegrityError:
    """Damaged checkpoints stay where they are when there is no other, so that the next load says the same."""
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    if damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged)
        what = f"no undamaged {wanted} is left in {folder} ({reasons})"
        return IntegrityError(what, "bring the folder back from a copy, or start the run again")
    others = ", ".join(str(checkpoint_index.step_of(path)) for path in checkpoint_index.checkpoints(folder))
    fix = f"there are steps {others}" if others else "the run ended before its first save: start it again"
    return IntegrityError(f"there is no {wanted} in {folder}", fix)


def _refuse_other(checkpoint: Path, stored: StoredTensorBoxes, into: Tensors, wanted: Collection[str]) -> None:
    """`wanted` are the names of all ranks' tensors."""
    for name in sorted(into.keys() | stored.pieces.keys() - wanted):
        there = stored.describe(name) if name in stored.pieces else "absent"
        here = f"{into[name].dtype} {tuple(into[name].shape)}" if name in into else "absent"
        if there != here:
            what = f"{checkpoint} does not fit this run: {name!r} is {there} in the checkpoint and {here} here"
            raise UsageError(what, "resume with the recipe that the checkpoint was written with")


def _fill(stored: StoredTensorBoxes, into: Tensors) -> None:
    parts = local_parts(into)
    with torch.no_grad():
        for name, tensor in into.items():
            values = local_values(tensor)
            for part in parts[name]:
                stored.read(name, part.box, values[part.place])
