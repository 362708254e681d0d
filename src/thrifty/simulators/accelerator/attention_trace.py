"""Attention layers, the workload of attention designs: queries, keys and values, or only the mask of kept pairs.

Masks are True for kept pairs, packed eight to a byte. (Published files of ViTCoD are True for pruned pairs.) A unit is
one head of one example. Shapes: e examples, h heads, t queries, s keys, k head width, u = e·h units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from thrifty.core.errors import UsageError

_NUMBERS, _LENGTHS = ("q", "k", "v"), ("query_lengths", "key_lengths")


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Attention of one layer. Raises UsageError if shapes do not match or values are not finite."""

    name: str
    examples: int
    heads: int
    queries: int
    """Number of queries of the longest example."""
    keys: int
    width: int
    """Head width."""
    query_lengths: np.ndarray
    """Number of queries per example without padding, (examples,)."""
    key_lengths: np.ndarray
    """Number of keys per example without padding, (examples,)."""
    packed: np.ndarray | None = None
    """Mask of kept pairs (examples, heads, queries, ⌈keys/8⌉), uint8; None for all pairs."""
    q: np.ndarray | None = None
    """Queries (examples, heads, queries, width)."""
    k: np.ndarray | None = None
    """Keys (examples, heads, keys, width)."""
    v: np.ndarray | None = None
    """Values (examples, heads, keys, width)."""
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Counts of a filter (examples, heads, queries) by name, such as "candidates" and "iterations"; integers."""
    bits: int = 16
    """Bits per recorded value."""

    def __post_init__(self) -> None:
        self._check_kinds()
        e, h, t, s, d = self.examples, self.heads, self.queries, self.keys, self.width
        shapes = {"q": (e, h, t, d), "k": (e, h, s, d), "v": (e, h, s, d)}
        shapes |= {"packed": (e, h, t, -(-s // 8)), "query_lengths": (e,), "key_lengths": (e,)}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise UsageError(
                    f"layer {self.name!r}: {name} has shape {array.shape}, expected {shape}",
                    fix="pad all examples of the layer to one length, and pass lengths=[…]",
                )
        for name in _NUMBERS:
            array = getattr(self, name)
            if array is not None and not np.isfinite(array).all():
                place = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
                raise UsageError(
                    f"layer {self.name!r}: {name} is {array[place]} at {place}", fix="record the trace again"
                )
        for name, most in zip(_LENGTHS, (t, s), strict=True):
            lengths = getattr(self, name)
            if (lengths < 1).any() or (lengths > most).any():
                raise UsageError(
                    f"layer {self.name!r}: {name} are {lengths.min()} to {lengths.max()}",
                    fix=f"pass lengths from 1 to {most}",
                )
        for name, array in self.counts.items():
            if array.shape != (e, h, t) or array.dtype.kind not in "iu" or (array < 0).any():
                raise UsageError(
                    f"layer {self.name!r}: counts of {name!r} are {array.dtype} {array.shape}",
                    fix=f"pass integers >= 0 of shape {(e, h, t)}",
                )
        self._check_rows()

    def _check_kinds(self) -> None:
        """Raise UsageError unless sizes are integers of at least 1 and arrays have the expected dtypes."""
        for name in ("examples", "heads", "queries", "keys", "width", "bits"):
            size = getattr(self, name)
            if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
                raise UsageError(f"layer {self.name!r}: {name} is {size!r}", fix="pass an integer of at least 1")
        for names, kinds, word in (
            (_NUMBERS, "f", "floats"),
            (_LENGTHS, "iu", "integers"),
            (("packed",), "u", "uint8"),
        ):
            for name in names:
                array = getattr(self, name)
                if array is not None and (array.dtype.kind not in kinds or (kinds == "u" and array.itemsize > 1)):
                    raise UsageError(f"layer {self.name!r}: {name} has dtype {array.dtype}", fix=f"pass {word}")

    def _check_rows(self) -> None:
        if self.packed is None:
            return
        empty = (self.kept().sum(-1) == 0) & self._real_queries
        if empty.any():
            unit, row = map(int, np.argwhere(empty)[0])
            example, head = divmod(unit, self.heads)
            raise UsageError(
                f"layer {self.name!r}: the mask keeps no key for query {row} of head {head}, example {example} "
                f"({int(empty.sum())} queries without a key)",
                fix="keep at least the largest score of each query; masks are True for kept pairs",
            )

    @property
    def units(self) -> int:
        return self.examples * self.heads

    @cached_property
    def unit_queries(self) -> np.ndarray:
        """Number of queries per unit, (units,)."""
        return np.repeat(self.query_lengths.astype(np.int64), self.heads)

    @cached_property
    def unit_keys(self) -> np.ndarray:
        """Number of keys per unit, (units,)."""
        return np.repeat(self.key_lengths.astype(np.int64), self.heads)

    @property
    def _real_queries(self) -> np.ndarray:
        return np.arange(self.queries) < self.unit_queries[:, None]

    def per_query(self, cycles: np.ndarray | int) -> np.ndarray:
        """Broadcast `cycles` to (units, queries), with 0 for padding queries."""
        return np.where(self._real_queries, cycles, 0).astype(np.int64)

    def kept(self) -> np.ndarray:
        """Return (units, queries, keys), True for pairs that the mask keeps and that are not padding."""
        real = np.arange(self.keys) < self.unit_keys[:, None]
        real = real[:, None, :] & self._real_queries[:, :, None]
        if self.packed is None:
            return real
        return real & unpacked(self.packed, self.keys).reshape(self.units, self.queries, self.keys)

    @cached_property
    def kept_counts(self) -> np.ndarray:
        """Number of kept keys per query, (units, queries)."""
        if self.packed is None:
            return self.per_query(self.unit_keys[:, None])
        return self.kept().sum(-1, dtype=np.int64)

    def count(self, name: str) -> np.ndarray | None:
        """Return the counts `name` of a filter (units, queries), or None if the layer has no such counts."""
        counts = self.counts.get(name)
        return None if counts is None else self.per_query(counts.reshape(self.units, self.queries))

    @property
    def density(self) -> float:
        """Fraction of kept pairs, without padding."""
        return float(self.kept_counts.sum() / (self.unit_queries * self.unit_keys).sum())

    def masked(self, mask: np.ndarray, counts: Mapping[str, np.ndarray] | None = None) -> "AttentionLayer":
        """Return the layer with the mask (examples, heads, queries, keys) of a filter and the counts of that filter."""
        return replace(self, packed=packed(mask), counts=counts or {})


@dataclass(frozen=True, eq=False)
class AttentionTrace:
    """Attention layers and their provenance."""

    name: str
    layers: tuple[AttentionLayer, ...]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"trace {self.name!r} has no layers", fix="record a model that computes attention")

    @property
    def density(self) -> float:
        """Fraction of kept pairs over all layers, without padding."""
        pairs = [float((layer.unit_queries * layer.unit_keys).sum()) for layer in self.layers]
        return sum(l.density * p for l, p in zip(self.layers, pairs, strict=True)) / sum(pairs)  # noqa: E741

    @property
    def units(self) -> int:
        return sum(layer.units for layer in self.layers)


def layer_of(
    name: str,
    mask: np.ndarray | None = None,
    q: np.ndarray | None = None,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    lengths: Sequence[int] | np.ndarray | None = None,
    key_lengths: Sequence[int] | np.ndarray | None = None,
    counts: Mapping[str, np.ndarray] | None = None,
    width: int = 64,
    bits: int = 16,
) -> AttentionLayer:
    """Return a layer from a mask (e, h, t, s), from q (e, h, t, k) and k (e, h, s, k), or from both.

    `lengths` (examples,) is the number of queries per example. Shapes: e examples, h heads, t queries, s keys, k head
    width. If t = s, the default of `key_lengths` is `lengths`. Without q, `width` is the head width. Raises UsageError
    if the mask is missing and q or k is missing.
    """
    if mask is not None and mask.ndim == 4:
        examples, heads, queries, keys = mask.shape
    elif q is not None and k is not None and q.ndim == k.ndim == 4:
        (examples, heads, queries, _), keys = q.shape, k.shape[2]
    else:
        raise UsageError(
            f"layer {name!r} has neither a mask (e, h, t, s), nor q and k (e, h, t, k)",
            fix="pass mask=…",
        )
    longest = np.full(examples, queries)
    query_lengths = longest if lengths is None else np.asarray(lengths)
    if key_lengths is None:
        key_lengths = query_lengths if queries == keys else np.full(examples, keys)
    bitmap = None if mask is None else packed(mask)
    width = width if q is None else q.shape[-1]
    return AttentionLayer(
        name, examples, heads, queries, keys, width, query_lengths, np.asarray(key_lengths), bitmap,
        q, k, v, counts or {}, bits,
    )  # fmt: skip


def packed(mask: np.ndarray) -> np.ndarray:
    """Pack a boolean array, eight elements of the last dim per byte. Raises UsageError for other dtypes."""
    if mask.dtype != np.bool_:
        raise UsageError(f"the mask is {mask.dtype}, not boolean", fix="pass True for kept pairs, for example mask > 0")
    return np.packbits(mask, axis=-1)


def unpacked(bitmap: np.ndarray, keys: int) -> np.ndarray:
    """Reverse `packed`: return a boolean array with `keys` elements in the last dim."""
    return np.unpackbits(bitmap, axis=-1, count=keys).astype(bool)
