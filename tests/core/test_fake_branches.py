"""Masks of transformers models on fake tensors equal those on real tensors."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from thrifty.core.fake_branches import causal_masks_of_plain_rows


def test_shared_position_ids_need_no_mask_on_fake_tensors() -> None:
    find = masking_utils.find_packed_sequence_indices
    packed = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0]])
    shared = torch.arange(4)[None].expand(2, -1)
    with FakeTensorMode() as mode, causal_masks_of_plain_rows():
        assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None].expand(2, -1)) is None
        packed_indices = masking_utils.find_packed_sequence_indices(mode.from_tensor(packed))
        assert packed_indices is not None and packed_indices.shape == packed.shape
    with causal_masks_of_plain_rows():
        assert masking_utils.find_packed_sequence_indices(shared) is None
        assert torch.equal(masking_utils.find_packed_sequence_indices(packed), find(packed))
        alone = torch.tensor([[0, 1, 0, 1]])
        assert torch.equal(masking_utils.find_packed_sequence_indices(alone), find(alone))
    assert masking_utils.find_packed_sequence_indices is find
