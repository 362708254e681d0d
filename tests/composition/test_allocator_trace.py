"""Live memory, reconstructed from the allocator's events."""

import pytest
from benchmarks.allocator_trace import AllocatedBlocks


def test_live_bytes_of_allocations_and_frees() -> None:
    blocks = AllocatedBlocks()
    blocks.allocate(1000, 100)
    blocks.allocate(1100, 50)
    assert blocks.now == 150 and blocks.bytes_at({1100, 7}) == 50
    blocks.free(1000)
    blocks.free(1000)  # freed already
    assert blocks.now == 50


@pytest.mark.parametrize(
    ("start", "size", "left"),
    [(1000, 10, 10 + 300), (1050, 10, 10 + 300), (1050, 100, 100 + 200), (900, 1000, 1000), (1100, 100, 100 + 300)],
)
def test_reallocated_address_counts_as_freed(start: int, size: int, left: int) -> None:
    blocks = AllocatedBlocks()
    blocks.allocate(1000, 100)
    blocks.allocate(1100, 100)
    blocks.allocate(1500, 200)
    blocks.allocate(start, size)
    assert blocks.now == left
