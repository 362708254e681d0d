"""The same bits each time: on a GPU, kernels that add up in a fixed order."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thrifty.core.errors import ThriftyError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""How cuBLAS shares out its memory: without a value torch refuses its products here. 8 buffers of 4 MiB."""


@contextmanager
def deterministic_kernels(device: torch.device, wanted: bool = True) -> Iterator[None]:
    """Inside, two runs of one program on one kind of GPU agree to the last bit: sums by atomic additions, as in the
    backward passes of attention, of embeddings and of `index_add`, are made in a fixed order. A processor's are anyway.

    Raises ThriftyError for an operation that has no such kernel.
    """
    if device.type != "cuda" or not wanted:
        yield
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # torch would also clear all memory that it hands out, for programs that read it before they write it
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
        torch.utils.deterministic.fill_uninitialized_memory = filled


def missing_deterministic_kernel(error: Exception) -> ThriftyError | None:
    """What to tell of torch's refusal of an operation that has no such kernel; None for any other error."""
    if not isinstance(error, RuntimeError) or "deterministic" not in str(error):
        return None
    return ThriftyError(
        f"an operation of this run gives other bits each time on a GPU: {str(error).splitlines()[0]}",
        fix="--set deterministic=false; a resumed run is then the same but for rounding",
    )
