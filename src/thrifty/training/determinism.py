"""Deterministic kernels: repeated runs on a GPU are bit-identical."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thrifty.core.errors import ThriftyError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable for the workspace of cuBLAS. If the variable is not set, torch refuses matmuls in deterministic
mode. `:4096:8` means 8 buffers of 4 MiB."""


@contextmanager
def deterministic_kernels(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Use deterministic kernels inside the context: two runs on the same GPU model are bit-identical. Atomic additions,
    as in the backward passes of attention, embeddings and `index_add`, run in a fixed order. CPU kernels always have a
    fixed order. Raise ThriftyError for an operation without a deterministic kernel."""
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory
    # torch would also fill all newly allocated memory, for programs that read memory before they write it
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if lacking := missing_deterministic_kernel(error):
            raise lacking from error
        raise
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill_before


def unordered_kernels(device: torch.device) -> str:
    """Return a notice if kernels of the device have no fixed order; "" for other devices."""
    if device.type != "mps":
        return ""
    return "kernels on mps have no guaranteed order: a resumed run may differ from an uninterrupted run by rounding"


def missing_deterministic_kernel(error: Exception) -> ThriftyError | None:
    """Return a readable error if torch refused an operation in deterministic mode; None for any other error."""
    if not isinstance(error, RuntimeError) or "deterministic" not in str(error):
        return None
    return ThriftyError(
        f"an operation of this run returns different bits each time on a GPU: {str(error).splitlines()[0]}",
        fix="--set deterministic=false; a resumed run then differs by rounding",
    )
