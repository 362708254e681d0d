"""A keeper of activations in codes: which saved tensors are coded, which take a bit each, which stay as they are."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.kernels.quantization_ranges import GROUP, by_group, by_head
from thrifty.kernels.quantized_tensors import PackedMask, QuantizedTensor, memory_order, pack_mask, quantize_tensor
from thrifty.machine.cpu_features import CHUNK_ELEMENTS
from thrifty.memory.saved_tensor_hooks import SMALLEST, is_quantizable

SAMPLE = 512
"""Numbers of a tensor that are looked at to tell what it is."""


class QuantizedStore:
    """Keeps the activations of one forward pass in codes: `kept_by(InCodes(seed))` around any forward pass. The n-th
    tensor in codes gets `bits(n)` bits. `alive` are storages that stay anyway, such as a model's buffers; `like` is a
    pass with as many tensors, whose choice of them is to be followed."""

    def __init__(
        self,
        seed: int,
        bits: Callable[[int], int] = lambda position: 4,
        group: int = GROUP,
        heads: bool = False,
        smallest: int = SMALLEST,
        alive: frozenset[int] = frozenset(),
        like: "QuantizedStore | None" = None,
    ):
        self.seed, self.bits, self.group, self.heads, self.smallest = seed, bits, group, heads, smallest
        self.alive, self.like = alive, like
        self.in_codes: list[bool] = []
        """Of each tensor that was handed over."""
        self.numbers: list[int] = []
        """Of each tensor in codes."""
        self.small_in_a_row = 0

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        followed = self.like is None or self.like.in_codes[len(self.in_codes)]
        kept = self.kept(activation) if followed else None
        self.in_codes.append(isinstance(kept, QuantizedTensor))
        return None if kept is None else kept.decode

    def kept(self, activation: Tensor) -> QuantizedTensor | PackedMask | None:
        if self.like is not None:
            return self.coded(activation, few_values(activation)[0])
        if activation.numel() < self.smallest or activation.untyped_storage()._cdata in self.alive:
            return None
        if activation.dtype == torch.bool:
            return pack_mask(activation)
        if not is_quantizable(activation):
            return None
        if self.is_statistic(activation):
            self.small_in_a_row += 1
            return None
        self.small_in_a_row = 0
        zeros, values = few_values(activation)
        return self.coded(activation, zeros) if values is None else pack_mask(activation, values)

    def coded(self, activation: Tensor, zeros: bool) -> QuantizedTensor | None:
        position, numbers = len(self.numbers), activation.numel()
        ranges = by_head(activation.size(), activation.stride(), self.group) if self.heads else None
        ranges = ranges or by_group(numbers, self.group)
        coded = quantize_tensor(activation, self.bits(position), self.seed + position, ranges, zeros)
        if coded is not None:
            self.numbers.append(numbers)
        return coded

    def is_statistic(self, activation: Tensor) -> bool:
        """Whether it is one of few numbers for each row, as the means of a norm or the normalisers of attention, beside
        what they were made from. They are small, and an error in one is an error in all that it is applied to."""
        small = 8 * activation.numel() <= max(self.numbers[-3:], default=0)
        return activation.size(-1) == 1 or (small and self.small_in_a_row < 3)


def few_values(activation: Tensor) -> tuple[bool, tuple[float, float] | None]:
    """Whether exact zeros are frequent, and the two values of a tensor that has no others: a dropout mask, or one that
    is added to scores."""
    if isinstance(activation, FakeTensor):
        return False, None
    numbers = memory_order(activation)
    sample = numbers[:: len(numbers) // SAMPLE | 1].tolist()  # an odd stride meets all channels
    zeros = 16 * sample.count(0.0) >= len(sample)
    distinct = set(sample)
    if len(distinct) > 2:
        return zeros, None
    low, high = min(distinct), max(distinct)
    only = all(bool(((part == low) | (part == high)).all()) for part in numbers.split(64 * CHUNK_ELEMENTS))
    return zeros, (low, high) if only else None
