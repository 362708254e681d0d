"""The masks of a sparse run as a ticket: a file that other runs take them from."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import UsageError
from thrifty.optim.weight_masks import SLOT
from thrifty.techniques.sparsity.mask_from_file import density_of, mask_file_bytes
from thrifty.training import checkpoint


def masks_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks in a checkpoint's tensors, by the names of their weights."""
    masks = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        slot, _, parameter = rest.partition("/")
        if kind == "optimizer" and slot.endswith(SLOT) and tensor.numel():
            masks[parameter] = tensor
    return masks


def export_masks(run: Path, file: Path, step: int | None = None) -> tuple[float, str]:
    """Writes the masks that a sparse run had, whatever technique drew them, as a ticket for other runs; returns its
    density and its sha256, which a recipe must give with it. Raises UsageError for a run without masks and for a file
    that exists."""
    loaded = checkpoint.load(run / "checkpoints", step)
    masks = masks_of(loaded.tensors)
    if not masks:
        raise UsageError(f"{run} keeps no weights under masks", fix="name a run with a sparse technique")
    if file.exists():
        raise UsageError(f"{file} exists already", fix="name a file that does not exist yet")
    weights = {name: loaded.tensors[f"parameters/{name}"] for name in masks}
    content = mask_file_bytes(masks, f"after step {loaded.step} of {run.name}", weights)
    return density_of(masks), AtomicFiles().swap(file, content).sha256
