"""`trace`: record or generate an attention trace, the input of simulated accelerators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import RenderableType
from torch import nn

from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.data.tokenizer import read_tokenizer
from thrifty.interface.loaded_model import load_for_sampling
from thrifty.models.families import assemble
from thrifty.models.model_presets import PRESETS
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.reporting.run_record import run_folder
from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.simulators.accelerator.synthetic_traces import PATTERNS, synthetic_trace
from thrifty.simulators.accelerator.trace_file import load_pruned_masks, save_trace, with_dtype
from thrifty.simulators.accelerator.trace_recorder import record_attention
from thrifty.training.data_opening import open_examples
from thrifty.training.trained_model import load_trained_model


@dataclass(frozen=True, repr=False)
class SavedTrace(PrintedResult):
    """An attention trace in a file."""

    trace: AttentionTrace
    path: Path

    def as_dict(self) -> dict[str, Any]:
        return describe_trace(self.trace) | {"path": str(self.path), "bytes": self.path.stat().st_size}

    def __rich__(self) -> RenderableType:
        facts = self.as_dict()
        return lines(
            f"{facts['layers']} layers, {facts['units']} (example, head) pairs, {facts['queries']} x {facts['keys']} "
            f"tokens, head width {facts['width']}, density {facts['density']:.3f}",
            f"wrote {self.path}, {facts['bytes']:,} bytes",
        )


def trace(
    source: str | Path,
    out: str | Path = "trace.safetensors",
    *,
    examples: int = 2,
    length: int | None = None,
    data: str | Path | None = None,
    dtype: Literal["float32", "float16"] = "float32",
    density: float = 0.1,
    layers: int = 1,
    heads: int = 12,
    width: int = 64,
    seed: int = 0,
    model: nn.Module | BuildModel | str | None = None,
) -> SavedTrace:
    """Write an attention trace to the file `out`.

    Args:
        source: One of: a run, traced on its held-out data; a model folder, traced on the text of `data`; a preset with
            random weights, traced on random tokens; a .npy file of ViTCoD's masks, in which True is pruned; a mask
            pattern: "uniform", "balanced", "runs", "diagonal" or "power-law".
        length: Number of tokens per example.
        density: Fraction of the query-key pairs that a mask pattern keeps.
        width: Width of a head, for mask files and mask patterns.
        model: Your own model, if the run trained it.

    Raises UsageError if the file exists or the source is unknown.

    Example::

        thrifty.trace("diagonal", "diagonal.safetensors", density=0.2, length=64)
    """
    path, source = Path(out), str(source)
    if path.exists():
        raise UsageError(f"{str(path)!r} exists already", fix="--out other.safetensors; or remove the file")
    if source in PATTERNS:
        sizes = [length or 128] * examples
        recorded = synthetic_trace(source, density, layers, heads, width=width, lengths=sizes, seed=seed)
    elif source.endswith(".npy"):
        recorded = load_pruned_masks(Path(source), width)
    else:
        text = None if data is None else Path(data)
        recorded = with_dtype(
            _recorded(source, examples, length, text, seed, UserObjects.from_arguments(model=model)), dtype
        )
    save_trace(recorded, path)
    return SavedTrace(recorded, path)


def describe_trace(trace: AttentionTrace) -> dict[str, Any]:
    """Return the content of a trace as plain data."""
    return {
        "name": trace.name,
        "layers": len(trace.layers),
        "units": trace.units,
        "queries": max(layer.queries for layer in trace.layers),
        "keys": max(layer.keys for layer in trace.layers),
        "width": trace.layers[0].width,
        "density": trace.density,
        "provenance": dict(trace.provenance),
    }


def _recorded(
    source: str, examples: int, length: int | None, data: Path | None, seed: int, objects: UserObjects
) -> AttentionTrace:
    if source in PRESETS:
        return _of_preset(source, examples, length, seed)
    if (Path(source) / "config.json").is_file():
        return _of_folder(Path(source), examples, length, data)
    try:
        run = run_folder(source)
    except UsageError as error:
        near = did_you_mean(source, [*PRESETS, *PATTERNS])
        raise UsageError(
            f"{source!r} is not a run, model folder, preset, mask pattern or .npy file", fix=near
        ) from error
    return _of_run(run, examples, objects)


def _of_run(run: Path, examples: int, objects: UserObjects) -> AttentionTrace:
    model, recipe = load_trained_model(run, plain=False, objects=objects)
    objective, opened = open_examples(recipe, run=run)
    about = {"run": run.name, "data": str(recipe.data.source), "objective": recipe.objective.name}
    about["examples"] = str(examples)
    return record_attention(model, opened.held_out.batches(examples, examples), objective.predict, about, run.name)


def _of_folder(folder: Path, examples: int, length: int | None, data: Path | None) -> AttentionTrace:
    if data is None or not data.is_file():
        raise UsageError(f"{str(folder)!r} is a model folder, which must be traced on a text", fix="--data FILE")
    model, tokenizer, context = load_for_sampling(folder, UserObjects())
    each = trim_to_context(length, context, folder.name)
    tokens = torch.tensor(read_tokenizer(tokenizer).encode(data.read_text(encoding="utf-8")))
    if len(tokens) < each:
        raise UsageError(
            f"{str(data)!r} has {len(tokens)} tokens, fewer than the {each} of one example",
            fix=f"pass a longer text; or --length {len(tokens)}",
        )
    rows = tokens[: len(tokens) // each * each].unflatten(0, (-1, each))[:examples]
    return record_attention(model, [rows], provenance={"folder": folder.name, "data": data.name}, name=folder.name)


def trim_to_context(length: int | None, context: int | None, model: str) -> int:
    """Return the number of tokens per example: `length`; by default 128, or the model's context if that is
    smaller. Raise UsageError if `length` exceeds the context.
    """
    if context is not None and (length or 0) > context:
        raise UsageError(f"{model!r} has a context of {context} tokens, fewer than {length}", fix=f"--length {context}")
    return length or min(128, context or 128)


def _of_preset(name: str, examples: int, length: int | None, seed: int) -> AttentionTrace:
    shape = PRESETS[name]
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = assemble(shape)
    task = getattr(model, "task", None)
    if shape.style == "vit":
        inputs = (torch.randn(examples, 3, shape.image, shape.image, generator=generator),)
    elif task in ("next_token", "masked_token", "sequence_to_sequence"):
        each = trim_to_context(length, shape.length, name)
        tokens = torch.randint(shape.vocabulary, (examples, each), generator=generator)
        inputs = (tokens, tokens) if task == "sequence_to_sequence" else (tokens,)
    else:
        raise RefusedError(f"the preset {name!r} cannot be traced on random inputs", fix="train it, and trace the run")
    about = {"preset": name, "values": f"random, seed {seed}", "data": "random"}
    return record_attention(model, [inputs], lambda model, inputs: model(*inputs), about, name)
