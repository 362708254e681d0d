"""Fused order of slices for several ranks, and boxes of the whole tensor in a part of the stored tensor."""

import torch

from thrifty.core.shard_layout import FusedOrder, TensorBox, order_of, tag_order, tag_order_like


def test_fused_order_round_trip() -> None:
    order = FusedOrder(0, (4, 2, 2), ranks=2)
    whole = torch.arange(8)
    kept = order.to_stored(whole)
    assert kept.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert torch.equal(order.whole(kept), whole)


def test_boxes_of_a_part_in_fused_order_address_its_values() -> None:
    order = FusedOrder(1, (6, 3), ranks=3)
    whole = torch.arange(36).view(4, 9)
    kept = order.to_stored(whole)
    for first in range(9):
        for stop in range(first, 10):
            box = TensorBox((4, 9), (1, first), (2, stop - first))
            boxes = list(order.boxes(box))
            assert sum(there.numel for there, _ in boxes) == box.numel
            for there, here in boxes:
                assert torch.equal(whole[there.slices], kept[box.slices][here.within(box)])


def test_replicated_tensor_takes_no_fused_order() -> None:
    parameter = tag_order(torch.zeros(8, 2), FusedOrder(0, (4, 4), ranks=2))
    assert order_of(tag_order_like(parameter, torch.zeros(8, 2))) is None  # replicated, in plain order
    assert order_of(parameter) == FusedOrder(0, (4, 4), ranks=2)
