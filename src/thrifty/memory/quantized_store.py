"""Activation store that decides which saved tensors are quantized, stored as one-bit masks, or kept exactly."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.kernels.quantization_ranges import GROUP, by_group, by_head
from thrifty.kernels.quantized_tensors import PackedMask, QuantizedTensor, memory_order, pack_mask, quantize_tensor
from thrifty.machine.cpu_features import CHUNK_ELEMENTS
from thrifty.memory.saved_tensor_hooks import SMALLEST, is_quantizable

SAMPLE = 512
"""Number of elements of a tensor that are sampled to classify it."""


class QuantizedStore:
    """Activation store that quantizes the activations of one forward pass:
    `use_activation_store(QuantizedStore(seed))`.

    The n-th quantized tensor has `bits(n)` bits. `alive` contains storages that stay in memory anyway, such as a
    model's buffers. `like` is the store of an earlier pass with the same tensors; its choice of tensors is repeated.
    """

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
        self.is_quantized: list[bool] = []
        """For each saved tensor, True if it is quantized."""
        self.numbers: list[int] = []
        """Number of elements of each quantized tensor."""
        self.small_in_a_row = 0

    def store(self, activation: Tensor) -> Callable[[], Tensor] | None:
        followed = self.like is None or self.like.is_quantized[len(self.is_quantized)]
        compressed = self.compress(activation) if followed else None
        self.is_quantized.append(isinstance(compressed, QuantizedTensor))
        return None if compressed is None else compressed.decode

    def compress(self, activation: Tensor) -> QuantizedTensor | PackedMask | None:
        if self.like is not None:
            return self.quantize(activation, few_values(activation)[0])
        if activation.ndim == 0 or activation.numel() < self.smallest:
            return None
        if activation.untyped_storage()._cdata in self.alive:
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
        return self.quantize(activation, zeros) if values is None else pack_mask(activation, values)

    def quantize(self, activation: Tensor, zeros: bool) -> QuantizedTensor | None:
        position, numbers = len(self.numbers), activation.numel()
        ranges = by_head(activation.size(), activation.stride(), self.group) if self.heads else None
        ranges = ranges or by_group(numbers, self.group)
        quantized = quantize_tensor(activation, self.bits(position), self.seed + position, ranges, zeros)
        if quantized is not None:
            self.numbers.append(numbers)
        return quantized

    def is_statistic(self, activation: Tensor) -> bool:
        """Return True if a tensor has few elements per row, such as means of a norm or softmax normalizers of
        attention.

        Such tensors are small. An error in one of their elements changes all elements that the statistic is
        applied to.
        """
        small = 8 * activation.numel() <= max(self.numbers[-3:], default=0)
        return activation.size(-1) == 1 or (small and self.small_in_a_row < 3)


def few_values(activation: Tensor) -> tuple[bool, tuple[float, float] | None]:
    """Return two facts about a tensor: True if exact zeros are frequent, and its two values if it has only two.

    Tensors with two values are dropout masks and additive attention masks.
    """
    if isinstance(activation, FakeTensor):
        return False, None
    elements = memory_order(activation)
    sample = elements[:: len(elements) // SAMPLE | 1].tolist()  # with an odd stride, all channels are sampled
    zeros = 16 * sample.count(0.0) >= len(sample)
    distinct = set(sample)
    if len(distinct) > 2:
        return zeros, None
    low, high = min(distinct), max(distinct)
    only = all(bool(((part == low) | (part == high)).all()) for part in elements.split(64 * CHUNK_ELEMENTS))
    return zeros, (low, high) if only else None
