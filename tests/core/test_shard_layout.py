"""The order in which slices are kept for several ranks, and the boxes of the whole that lie in a part of it."""

import torch

from thrifty.core.shard_layout import FusedOrder, TensorBox, order_of, tag_order, tag_order_like


def test_each_rank_has_its_part_of_every_slice_and_the_whole_comes_back() -> None:
    order = FusedOrder(0, (4, 2, 2), ranks=2)
    whole = torch.arange(8)
    kept = order.kept(whole)
    assert kept.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert torch.equal(order.whole(kept), whole)


def test_the_boxes_of_any_part_of_what_is_kept_are_where_its_values_come_from() -> None:
    order = FusedOrder(1, (6, 3), ranks=3)
    whole = torch.arange(36).view(4, 9)
    kept = order.kept(whole)
    for first in range(9):
        for stop in range(first, 10):
            held = TensorBox((4, 9), (1, first), (2, stop - first))
            boxes = list(order.boxes(held))
            assert sum(there.numel for there, _ in boxes) == held.numel
            for there, here in boxes:
                assert torch.equal(whole[there.slices], kept[held.slices][here.within(held)])


def test_only_what_is_divided_along_the_same_lines_takes_over_an_order() -> None:
    parameter = tag_order(torch.zeros(8, 2), FusedOrder(0, (4, 4), ranks=2))
    assert order_of(tag_order_like(parameter, torch.zeros(8, 2))) is None  # every rank has it whole, in plain order
    assert order_of(parameter) == FusedOrder(0, (4, 4), ranks=2)
