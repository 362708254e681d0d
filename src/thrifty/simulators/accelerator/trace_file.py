"""Trace files: a safetensors file with provenance in its header, or ViTCoD's published masks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.simulators.accelerator.attention_trace import AttentionLayer, AttentionTrace, layer_of

FORMAT = "thrifty attention trace, 1"
_TENSORS = ("q", "k", "v", "packed", "query_lengths", "key_lengths")
_SIZES = ("name", "examples", "heads", "queries", "keys", "width", "bits")


def save_trace(trace: AttentionTrace, path: Path) -> None:
    """Write a trace. Tensors are named LAYER.q, LAYER.packed and so on. The header holds sizes and provenance.

    Raises UsageError if the file cannot be written.
    """
    tensors, layers = {}, []
    for number, layer in enumerate(trace.layers):
        for name in _TENSORS:
            array = getattr(layer, name)
            if array is not None:
                tensors[f"{number}.{name}"] = np.ascontiguousarray(array)
        for name, counted in layer.counts.items():
            tensors[f"{number}.counts.{name}"] = np.ascontiguousarray(counted.astype(np.int32))
        layers.append({name: getattr(layer, name) for name in _SIZES})
    about = {"name": trace.name, "provenance": dict(trace.provenance), "layers": layers}
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(f"'{path}' cannot be written", fix="pass a file in an existing folder")
    try:
        save_file(tensors, path, metadata={"format": FORMAT, "trace": json.dumps(about)})
    except SafetensorError as error:
        raise UsageError(f"'{path}' cannot be written: {error}", fix="free some space, or pass another path") from None


def load_trace(path: Path) -> AttentionTrace:
    """Read a trace. Raises UsageError if the file or a layer is invalid, IntegrityError if the file is damaged."""
    if not path.is_file():
        raise UsageError(f"there is no trace '{path}'", fix=f"thrifty trace RUN --out {path}")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(
            f"'{path}' cannot be read as a safetensors file: {error}", fix="write the trace again with thrifty trace"
        ) from error
    if metadata.get("format") != FORMAT:
        raise UsageError(f"'{path}' is not an attention trace", fix="write one with thrifty trace")
    try:
        about = json.loads(metadata["trace"])
        layers = tuple(_layer(number, sizes, tensors) for number, sizes in enumerate(about["layers"]))
        provenance = {str(key): str(value) for key, value in about["provenance"].items()}
        return AttentionTrace(str(about["name"]), layers, provenance)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise IntegrityError(
            f"'{path}' lacks a part of the trace: {error}", fix="write the trace again with thrifty trace"
        ) from error


def _layer(number: int, sizes: dict, tensors: dict[str, np.ndarray]) -> AttentionLayer:
    own = f"{number}.counts."
    counts = {name.removeprefix(own): value for name, value in tensors.items() if name.startswith(own)}
    arrays = {name: tensors.get(f"{number}.{name}") for name in _TENSORS}
    for name in ("query_lengths", "key_lengths"):
        arrays[name] = tensors[f"{number}.{name}"]
    return AttentionLayer(**sizes, **arrays, counts=counts)


def load_pruned_masks(path: Path, width: int = 64) -> AttentionTrace:
    """Read masks (layers, heads, t, t) from an .npy file. True means pruned, as in ViTCoD's published files.

    Raises UsageError if the file has other contents.
    """
    try:
        pruned = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"'{path}' cannot be read as an .npy file of masks: {error}", fix="save masks with numpy.save"
        ) from error
    if pruned.ndim != 4 or pruned.dtype != np.bool_ or pruned.shape[2] != pruned.shape[3] or not pruned.size:
        raise UsageError(
            f"'{path}' holds {pruned.dtype} of shape {pruned.shape}, expected booleans (layers, heads, t, t)",
            fix="save masks with True for pruned pairs",
        )
    layers = tuple(layer_of(f"layer {number}", mask=~mask[None], width=width) for number, mask in enumerate(pruned))
    return AttentionTrace(path.stem, layers, {"file": path.name, "polarity": "True is pruned in the file"})


def with_dtype(trace: AttentionTrace, dtype: str) -> AttentionTrace:
    """Return the trace with q, k and v converted to "float16" or "float32"."""
    layers = []
    for layer in trace.layers:
        arrays = {name: getattr(layer, name) for name in ("q", "k", "v")}
        cast = {name: array.astype(dtype) for name, array in arrays.items() if array is not None}
        layers.append(replace(layer, **cast))
    return replace(trace, layers=tuple(layers))
