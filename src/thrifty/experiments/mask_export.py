"""Export of a sparse run's masks as a ticket: a file from which other runs load masks."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import UsageError
from thrifty.optim.weight_masks import SLOT
from thrifty.techniques.sparsity.mask_from_file import density_of, mask_file_bytes
from thrifty.training import checkpoint
from thrifty.training.checkpoint_index import CheckpointChoice


def masks_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the masks among a checkpoint's tensors, keyed by weight names."""
    masks = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        slot, _, parameter = rest.partition("/")
        if kind == "optimizer" and slot.endswith(SLOT) and tensor.numel():
            masks[parameter] = tensor
    return masks


def export_masks(run: Path, file: Path, step: CheckpointChoice = "last") -> tuple[float, str]:
    """Write the masks of a sparse run as a ticket; return its density and its sha256.

    The run may use any sparse technique. A recipe that loads the ticket must contain this sha256. Raises UsageError if
    the run has no masks, or if the file exists.
    """
    loaded = checkpoint.load(run / "checkpoints", step)
    masks = masks_of(loaded.tensors)
    if not masks:
        raise UsageError(f"'{run}' has no masks", fix="choose a run with a sparse technique")
    if file.exists():
        raise UsageError(f"'{file}' exists already", fix="choose another file name")
    weights = {name: loaded.tensors[f"parameters/{name}"] for name in masks}
    content = mask_file_bytes(masks, f"after step {loaded.step} of {run.name}", weights)
    return density_of(masks), AtomicFiles().swap(file, content).sha256
