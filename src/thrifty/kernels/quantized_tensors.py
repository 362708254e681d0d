"""Quantization of whole tensors with `groupwise_quantization.py`.

Large tensors use compiled code if there is a compiler: C++ on a CPU, torch.compile on a GPU. Other tensors use torch
operations, on a CPU in pieces that fit the cache. Results are equal bit for bit, except the last bit of divisions that
a GPU compiler rounds differently. Quantization and dequantization are one torch operation each. Their temporary memory
is therefore invisible to tracing, and their shapes can be traced.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.kernels import compiled_quantization
from thrifty.kernels.autocast_inputs import without_autocast
from thrifty.kernels.groupwise_quantization import (
    decode_mask_lines,
    encode_mask_lines,
    extremes,
    pack_lines,
    quantize_lines,
    round_outward,
    seed_word,
    unpack_lines,
    words_of_places,
)
from thrifty.kernels.quantization_ranges import GROUP, QuantizationRanges, by_group
from thrifty.machine.cpu_features import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS

COMPILED_FROM = 2**16
"""Minimum number of elements of a tensor that uses compiled code."""
MIXED = 8
"""Number of operations after which torch's compiler stores a result that is used twice, instead of inlining it.

A hash computes six results in sequence and uses each of them twice.
"""
_TOO_WIDE = 1e30
"""Maximum step. Larger steps occur only for attention masks that contain the lowest finite number."""


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized tensor. `decode` returns a tensor of the original shape, dtype and memory order, with the same values
    at every call.
    """

    codes: Tensor
    least: Tensor
    step: Tensor
    ranges: QuantizationRanges
    bits: int
    zeros: bool
    seed: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def decode(self) -> Tensor:
        r = self.ranges
        lines = _decode(
            self.codes, self.least, self.step, [r.outer, r.count, r.inner], self.bits, self.zeros, self.seed, self.dtype
        )
        return lines.as_strided(self.size, self.stride)


@dataclass(frozen=True)
class PackedMask:
    """Tensor of two values, stored exactly with one bit per element."""

    codes: Tensor
    values: tuple[float, float]
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def decode(self) -> Tensor:
        return _decode_mask(self.codes, *self.values, self.dtype).as_strided(self.size, self.stride)


def quantize_tensor(
    tensor: Tensor, bits: int, seed: int, ranges: QuantizationRanges | None = None, zeros: bool = False
) -> QuantizedTensor | None:
    """Return a dense floating-point tensor (…) quantized to 2, 4 or 8 bits. Return None if the tensor has non-finite
    elements, or a range beyond 10^30, as only attention masks have. With `zeros`, exact zeros stay zero. Positive
    elements then never become zero in groups without negative elements; the backward pass of ReLU relies on this.
    """
    r = ranges or by_group(tensor.numel())
    codes, least, step, sound = _encode(memory_order(tensor), [r.outer, r.count, r.inner], r.width, bits, zeros, seed)
    if not isinstance(sound, FakeTensor) and not bool(sound):
        return None
    return QuantizedTensor(codes, least, step, r, bits, zeros, seed, tensor.dtype, tensor.size(), tensor.stride())


def pack_mask(tensor: Tensor, values: tuple[float, float] = (0.0, 1.0)) -> PackedMask:
    """Return a dense boolean tensor (…), or a tensor of the two `values` only, packed to one bit per element."""
    codes = _encode_mask(memory_order(tensor), values[1])
    return PackedMask(codes, values, tensor.dtype, tensor.size(), tensor.stride())


def memory_order(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor (…) in memory order, as a view (n,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.library.custom_op("thrifty::encode_groups", mutates_args=())
@torch.no_grad()
@without_autocast
def _encode(
    numbers: Tensor, ranges: list[int], width: int, bits: int, zeros: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the bytes of each line, minimum and step of each range, and True if the tensor can be quantized."""
    outer, count, inner = ranges
    words = seed_word(seed, numbers.device), _words_of_places(width, numbers.device)
    if outer == 1 and inner == width:
        parts = [_run(pack_lines, part, *words, lines.start, bits, zeros) for lines, part in _lines(numbers, width)]
        codes, least, step = map(_joined, zip(*parts, strict=True))
    else:
        ends = [_run(extremes, part, zeros) for _, part in _lines(numbers, width)]
        low, high = (_joined(end).view(outer, count, -1) for end in zip(*ends, strict=True))
        least, step = round_outward(low.amin((0, 2)), high.amax((0, 2)), bits, zeros)
        each = [_expand_to_lines(end, ranges, width) for end in (least, step)]
        parts = [
            _run(quantize_lines, part, *(end[lines] for end in each), *words, lines.start, bits, zeros)
            for lines, part in _lines(numbers, width)
        ]
        codes, least, step = _joined(parts), least.bfloat16(), step.bfloat16()
    return codes, least.flatten(), step.flatten(), step.amax() < _TOO_WIDE


@_encode.register_fake
def _(numbers: Tensor, ranges: list[int], width: int, bits: int, zeros: bool, seed: int) -> tuple[Tensor, ...]:
    lines = -(-numbers.numel() // width)
    codes = numbers.new_empty((lines, width * bits // 8), dtype=torch.uint8)
    ends = [numbers.new_empty(ranges[1], dtype=torch.bfloat16) for _ in range(2)]
    return codes, *ends, numbers.new_empty((), dtype=torch.bool)


@torch.library.custom_op("thrifty::decode_groups", mutates_args=())
@torch.no_grad()
@without_autocast
def _decode(
    codes: Tensor, least: Tensor, step: Tensor, ranges: list[int], bits: int, zeros: bool, seed: int, dtype: torch.dtype
) -> Tensor:
    width = codes.shape[1] * 8 // bits
    words = seed_word(seed, codes.device), _words_of_places(width, codes.device)
    each = [_expand_to_lines(end, ranges, width) for end in (least, step)]
    if _is_compiled(codes.device, dtype, len(codes) * width):
        return _run_compiled(unpack_lines, codes, *each, *words, 0, bits, zeros, dtype)
    lines = codes.new_empty((len(codes), width), dtype=dtype)
    for piece in _pieces(lines):
        ends = (end[piece] for end in each)
        lines[piece] = unpack_lines(codes[piece], *ends, *words, piece.start, bits, zeros, dtype)
    return lines


@_decode.register_fake
def _(
    codes: Tensor, least: Tensor, step: Tensor, ranges: list[int], bits: int, zeros: bool, seed: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((len(codes), codes.shape[1] * 8 // bits), dtype=dtype)


@torch.library.custom_op("thrifty::encode_mask", mutates_args=())
@torch.no_grad()
@without_autocast
def _encode_mask(numbers: Tensor, high: float) -> Tensor:
    value = torch.tensor(high, dtype=numbers.dtype, device=numbers.device)
    return _joined([_run(encode_mask_lines, part, value) for _, part in _lines(numbers, GROUP)])


@_encode_mask.register_fake
def _(numbers: Tensor, high: float) -> Tensor:
    return numbers.new_empty((-(-numbers.numel() // GROUP), GROUP // 8), dtype=torch.uint8)


@torch.library.custom_op("thrifty::decode_mask", mutates_args=())
@torch.no_grad()
@without_autocast
def _decode_mask(codes: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    values = [torch.tensor(value, dtype=dtype, device=codes.device) for value in (low, high)]
    if _is_compiled(codes.device, dtype, len(codes) * GROUP):
        return _run_compiled(decode_mask_lines, codes, *values)
    lines = codes.new_empty((len(codes), GROUP), dtype=dtype)
    for piece in _pieces(lines):
        lines[piece] = decode_mask_lines(codes[piece], *values)
    return lines


@_decode_mask.register_fake
def _(codes: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((len(codes), GROUP), dtype=dtype)


def _lines(numbers: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Split flat elements into lines, and yield pieces: the indices of some lines, and these lines (n, width).

    The last line is padded with its last element, because any other value could widen its range.
    """
    full = len(numbers) // width
    lines = numbers[: full * width].view(full, width)
    for piece in _pieces(lines):
        yield piece, lines[piece]
    if rest := len(numbers) - full * width:
        last = numbers[-1:].expand(width - rest)
        yield slice(full, full + 1), torch.cat([numbers[full * width :], last])[None]


def _pieces(lines: Tensor) -> Iterator[slice]:
    """Yield slices of lines: all lines at once for compiled code, otherwise as many as fit the cache."""
    size = CHUNK_ELEMENTS if lines.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    at_once = _is_compiled(lines.device, lines.dtype, lines.numel())
    rows = len(lines) if at_once else max(size // lines.shape[1], 1)
    for start in range(0, len(lines), max(rows, 1)):
        yield slice(start, min(start + rows, len(lines)))


@cache
def _words_of_places(width: int, device: torch.device) -> Tensor:
    return words_of_places(width, device)


def _expand_to_lines(ends: Tensor, ranges: list[int], width: int) -> Tensor:
    """Return minimums or steps of ranges (r,), repeated for each line as (n, 1)."""
    outer, count, inner = ranges
    return ends[None, :, None].expand(outer, count, inner // width).reshape(-1, 1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _is_compiled(device: torch.device, dtype: torch.dtype, numbers: int) -> bool:
    if numbers < COMPILED_FROM:
        return False
    return compiled_quantization.has_compiled_kernel(dtype) if device.type == "cpu" else _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _run(function: Callable[..., Any], lines: Tensor, *rest: Any) -> Any:
    compiled = _is_compiled(lines.device, lines.dtype, lines.numel())
    return _run_compiled(function, lines, *rest) if compiled else function(lines, *rest)


def _run_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run compiled code. On a GPU, one compilation covers any number of lines; each combination of the other arguments
    is compiled separately.
    """
    if arguments[0].device.type == "cpu":
        return getattr(compiled_quantization, function.__name__)(*arguments)
    constants = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            constants.append((argument.dtype, *argument.shape[1:]))
            if argument.ndim == 2:
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        else:
            constants.append(argument)
    return _compiled(function, tuple(constants))(*arguments)


@cache
def _compiled(function: FunctionType, constants: tuple[Any, ...]) -> Callable[..., Any]:
    # copy the code under a new name: torch.compile stops compiling code after eight compilations, and turns integers
    # that differ between compilations of one name into variables
    name = f"{function.__name__}_{sha256(repr(constants).encode()).hexdigest()[:12]}"
    own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    return torch.compile(own, options={"realize_opcount_threshold": MIXED})
