"""Storage of a planned block's tensors: on a tier, or quantized to few bits."""

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
from thrifty.memory.planner.memory_plan import BlockActions, BlockCosts, TensorAction, is_streamed
from thrifty.memory.selective_recompute import BlockPlan, Store, keep_tensor, store_large_only
from thrifty.memory.simulated_tier import SimulatedTier

Bits = Literal[0, 2, 4, 8]

PROBE_ELEMENTS = 2**22
"""Number of elements of the tensor that is transferred to measure the bandwidth of a link."""


class TierStore:
    """Tensors of one forward pass on a tier, by the block that stored them.

    Transfers of a block may overlap computation of the next block. In the backward pass, the first tensor that a block
    requires starts the transfers of the previous block.
    """

    def __init__(self, tier: StorageTier):
        self.tier = tier
        # handles live as long as the autograd graph
        self.sent: dict[int, list[weakref.ref[OffloadHandle]]] = defaultdict(list)
        self.streams: dict[int, list[weakref.ref[OffloadHandle]]] = defaultdict(list)

    def finish_transfer(self, block: int) -> None:
        """Wait for the transfers of this block. Afterwards the device memory of its sent tensors is free."""
        for handle in self.of(block):
            handle.finish_transfer()

    def store(self, block: int) -> Store:
        def send(tensor: Tensor) -> Callable[[], Tensor]:
            handle = self.tier.send(tensor)
            self.sent[block].append(weakref.ref(handle))

            def restore() -> Tensor:
                for before in self.of(block - 1):
                    before.prefetch()
                return handle.get()

            return restore

        return send

    def stream(self, block: int) -> Store:
        """Return a store for a block whose tensors return one by one, with at most one transfer per direction."""
        line, places = self.streams[block], set[int]()

        def send(tensor: Tensor) -> Callable[[], Tensor]:
            handle, place = self.tier.send(tensor), len(line)
            if previous := line[-1]() if line else None:
                previous.finish_transfer()
            line.append(weakref.ref(handle))

            def restore() -> Tensor:
                places.add(place)
                following = next((each for each in reversed(range(len(line))) if each not in places), None)
                if following is not None and (coming := line[following]()):
                    coming.prefetch()
                return handle.get()

            return restore

        return send

    def end_stream(self, block: int) -> None:
        """Wait for the streamed tensors of this block. Afterwards their device memory is free."""
        line = self.streams.get(block)
        if last := line[-1]() if line else None:
            last.finish_transfer()

    def of(self, block: int) -> list[OffloadHandle]:
        return [handle for reference in self.sent.get(block, ()) if (handle := reference()) is not None]


def build_block_plan(block: BlockCosts, actions: BlockActions, offload: Store, bits: int, key: str) -> BlockPlan:
    """Return the plan of a block. `offload` stores offloaded tensors, and `key` seeds stochastic rounding."""
    items, stored = block.tape.items, dict[int, Store]()
    for number, action in actions.items():
        if action is TensorAction.KEEP:
            stored[number] = keep_tensor
        elif action is TensorAction.OFFLOAD:
            stored[number] = offload
        elif action is TensorAction.COMPRESS:
            stored[number] = quantizing_store(
                bits, f"{key}/{number}", number in items and items[number].is_dropout_mask
            )
            if number in items and is_streamed(block, actions):
                stored[number] = store_large_only(stored[number], items[number].bytes)
    return BlockPlan(block.tape, stored, frozenset(actions.keys() - stored.keys()))


def quantizing_store(bits: int, key: str, mask: bool) -> Store:
    """Return a store with few bits per element. Values are rounded stochastically with the seed `key`.

    If `mask`, the tensor contains zeros and one other value. It is stored exactly, with one bit per element.
    """

    def compress(tensor: Tensor) -> Callable[[], Tensor]:
        if mask:
            codes = pack_mask(tensor, (0.0, _other_value(tensor)))
        else:
            codes = quantize_tensor(tensor, bits, seed_of(key), zeros=True)
        return (lambda: tensor) if codes is None else codes.decode

    return compress


def _other_value(mask: Tensor) -> float:
    return 1.0 if hasattr(mask, "fake_mode") else float(mask.amax())


def stored_bits(bits: int) -> float:
    """Return the stored bits per element: the quantized value, plus a share of two 16-bit values per group."""
    return bits + 32 / GROUP


@cache
def bytes_per_second(where: Where, folder: str, device: torch.device) -> float:
    """Return the measured bandwidth of a tier's link in one direction, or the configured bandwidth of a
    simulated tier.
    """
    with _disable_current_modes(), unset_fake_temporarily():
        # arange, because a random tensor would change the random state
        tensor = torch.arange(PROBE_ELEMENTS, dtype=torch.float32, device=device)
        tier = tier_for(where, tensor, folder)
        if isinstance(tier, SimulatedTier):
            return tier.clock.link.bandwidth

        def round_trip() -> None:
            handle = tier.send(tensor)
            handle.finish_transfer()
            handle.get()

        return 2 * tensor.nbytes / min(_seconds(round_trip, device) for _ in range(3))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
