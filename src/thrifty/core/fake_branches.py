"""Patches of libraries that branch on tensor values: fake tensors take the same branch as real tensors."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.tensor_tracing import tensor_bytes

_MASKS, _PACKED = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def causal_masks_of_plain_rows() -> Iterator[None]:
    """Make transformers omit the causal mask inside the block if each row is one text, on fake tensors too. On real
    tensors, transformers reads the position ids to detect such rows. On fake tensors it would build the mask, so
    attention would use another kernel. Fake rows that share the memory of one row of position ids count as one text
    each."""
    module = sys.modules.get(_MASKS)
    find = getattr(module, _PACKED, None)
    if find is None:
        yield
        return

    def find_packed(position_ids: Tensor) -> Tensor | None:
        is_one_row = position_ids.untyped_storage().nbytes() == tensor_bytes(position_ids[:1])
        return None if isinstance(position_ids, FakeTensor) and is_one_row else find(position_ids)

    setattr(module, _PACKED, find_packed)
    try:
        yield
    finally:
        setattr(module, _PACKED, find)
