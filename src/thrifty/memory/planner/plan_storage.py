"""Where a planned block leaves what it stores: on a tier, or in codes of few bits."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.core.randomness import seed_of
from thrifty.kernels.quantization_ranges import GROUP
from thrifty.kernels.quantized_tensors import pack_mask, quantize_tensor
from thrifty.memory.host_tier import OffloadHandle, StorageTier, Where, tier_for
from thrifty.memory.planner.memory_plan import BlockCosts, TensorAction, Ways, is_streamed
from thrifty.memory.selective_recompute import BlockPlan, Store, keep_tensor, store_large_only
from thrifty.memory.simulated_tier import SimulatedTier

Bits = Literal[0, 2, 4, 8]

TRIED = 2**22
"""Numbers of the tensor by which a link is measured."""


class TierStore:
    """One forward pass's tensors on a tier, by the block that stored them. A block's transfers may take as long as the
    next block computes; when those of the next are asked for, they are sent for."""

    def __init__(self, tier: StorageTier):
        self.tier = tier
        # tickets live as long as the graph that holds them
        self.sent: dict[int, list[weakref.ref[OffloadHandle]]] = defaultdict(list)
        self.streams: dict[int, list[weakref.ref[OffloadHandle]]] = defaultdict(list)

    def finish_transfer(self, block: int) -> None:
        """From here on the memory of what this block sent is free."""
        for ticket in self.of(block):
            ticket.finish_transfer()

    def store(self, block: int) -> Store:
        def send(tensor: Tensor) -> Callable[[], Tensor]:
            ticket = self.tier.send(tensor)
            self.sent[block].append(weakref.ref(ticket))

            def give() -> Tensor:
                for before in self.of(block - 1):
                    before.prefetch()
                return ticket.get()

            return give

        return send

    def stream(self, block: int) -> Store:
        """For a block whose tensors come back one by one: at most one is underway, either way."""
        line, places = self.streams[block], set[int]()

        def send(tensor: Tensor) -> Callable[[], Tensor]:
            ticket, place = self.tier.send(tensor), len(line)
            if before := line[-1]() if line else None:
                before.finish_transfer()
            line.append(weakref.ref(ticket))

            def give() -> Tensor:
                places.add(place)
                following = next((each for each in reversed(range(len(line))) if each not in places), None)
                if following is not None and (coming := line[following]()):
                    coming.prefetch()
                return ticket.get()

            return give

        return send

    def end_stream(self, block: int) -> None:
        """From here on the memory of what this block streamed is free."""
        line = self.streams.get(block)
        if last := line[-1]() if line else None:
            last.finish_transfer()

    def of(self, block: int) -> list[OffloadHandle]:
        return [ticket for reference in self.sent.get(block, ()) if (ticket := reference()) is not None]


def build_block_plan(block: BlockCosts, ways: Ways, elsewhere: Store, bits: int, key: str) -> BlockPlan:
    """What a block with these ways follows: what is offloaded goes elsewhere, and codes are drawn by the key."""
    items, stored = block.tape.items, dict[int, Store]()
    for number, way in ways.items():
        if way is TensorAction.KEEP:
            stored[number] = keep_tensor
        elif way is TensorAction.OFFLOAD:
            stored[number] = elsewhere
        elif way is TensorAction.COMPRESS:
            stored[number] = quantizing_store(bits, f"{key}/{number}", number in items and items[number].drawn)
            if number in items and is_streamed(block, ways):
                stored[number] = store_large_only(stored[number], items[number].bytes)
    return BlockPlan(block.tape, stored, frozenset(ways.keys() - stored.keys()))


def quantizing_store(bits: int, key: str, mask: bool) -> Store:
    """Few bits for each number, rounded by chance as the key says; a mask of zeros and one other value exactly, with
    one bit."""

    def code(tensor: Tensor) -> Callable[[], Tensor]:
        if mask:
            codes = pack_mask(tensor, (0.0, _other_value(tensor)))
        else:
            codes = quantize_tensor(tensor, bits, seed_of(key), zeros=True)
        return (lambda: tensor) if codes is None else codes.decode

    return code


def _other_value(mask: Tensor) -> float:
    return 1.0 if hasattr(mask, "fake_mode") else float(mask.amax())


def stored_bits(bits: int) -> float:
    """For each number: its code, and its share of two numbers of 16 bits for each group."""
    return bits + 32 / GROUP


@cache
def bytes_per_second(where: Where, folder: str, device: torch.device) -> float:
    """Of a tier's link, one way, measured here; of a simulated one what it says."""
    with _disable_current_modes(), unset_fake_temporarily():
        tensor = torch.arange(TRIED, dtype=torch.float32, device=device)  # nothing drawn: this may be amid a step
        tier = tier_for(where, tensor, folder)
        if isinstance(tier, SimulatedTier):
            return tier.clock.link.bandwidth

        def there_and_back() -> None:
            ticket = tier.send(tensor)
            ticket.finish_transfer()
            ticket.get()

        return 2 * tensor.nbytes / min(_seconds(there_and_back, device) for _ in range(3))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
