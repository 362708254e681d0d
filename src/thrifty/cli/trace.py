"""`thrifty trace`: what attention computes, recorded or made up, in one file that all simulated designs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.verb_output import print_result
from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.reporting.run_record import find_run

if TYPE_CHECKING:
    from thrifty.simulators.accelerator.attention_trace import AttentionTrace


@click.command()
@click.argument("source", metavar="RUN|MODEL|MASKS.npy|PATTERN")
@click.option("--out", type=click.Path(path_type=Path), default=Path("trace.safetensors"), show_default=True)
@click.option("--examples", type=click.IntRange(1), default=2, show_default=True, help="Examples to record.")
@click.option("--length", type=click.IntRange(2), help="Tokens of an example; the run's own, or 128.")
@click.option("--data", type=click.Path(path_type=Path), help="Text for a model folder, which reads it from there on.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option("--density", type=float, default=0.1, show_default=True, help="Of a pattern: the share that is kept.")
@click.option("--layers", type=click.IntRange(1), default=1, show_default=True, help="Of a pattern; likewise --heads.")
@click.option("--heads", type=click.IntRange(1), default=12, show_default=True)
@click.option("--width", type=click.IntRange(1), default=64, show_default=True, help="Of a head, for masks alone.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    source: str,
    out: Path,
    examples: int,
    length: int | None,
    data: Path | None,
    dtype: str,
    density: float,
    layers: int,
    heads: int,
    width: int,
    seed: int,
    as_json: bool,
) -> None:
    """Write the attention of a trained run on its held-out data, of a model folder on the text of --data, or of a
    preset with random values on random tokens. Also ViTCoD's masks from an .npy file, in which True is pruned, and
    masks from a seed: uniform, balanced, runs, diagonal or power-law."""
    from thrifty.simulators.accelerator.synthetic_traces import PATTERNS, synthetic_trace
    from thrifty.simulators.accelerator.trace_file import load_pruned_masks, save_trace, with_dtype

    if out.exists():
        raise UsageError(f"{out} exists already", fix="give another --out, or remove it")
    if source in PATTERNS:
        sizes = [length or 128] * examples
        trace = synthetic_trace(source, density, layers, heads, width=width, lengths=sizes, seed=seed)
    elif source.endswith(".npy"):
        trace = load_pruned_masks(Path(source), width)
    else:
        trace = with_dtype(_recorded(source, examples, length, data, seed), dtype)
    save_trace(trace, out)
    facts = describe_trace(trace) | {"path": str(out), "bytes": out.stat().st_size}
    words = (
        f"{facts['layers']} layers, {facts['units']} heads of examples, {facts['queries']} x {facts['keys']} tokens, "
        f"head width {facts['width']}, density {facts['density']:.3f}\nwrote {out}, {facts['bytes']:,} bytes"
    )
    print_result(facts, lambda: words, as_json)


def describe_trace(trace: AttentionTrace) -> dict[str, Any]:
    """What a trace holds, as plain data."""
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


def _recorded(source: str, examples: int, length: int | None, data: Path | None, seed: int) -> AttentionTrace:
    from thrifty.models.model_presets import PRESETS
    from thrifty.simulators.accelerator.synthetic_traces import PATTERNS

    if source in PRESETS:
        return _of_preset(source, examples, length, seed)
    if (Path(source) / "config.json").is_file():
        return _of_folder(Path(source), examples, length, data)
    try:
        run = find_run(source)
    except UsageError as error:
        near = did_you_mean(source, [*PRESETS, *PATTERNS])
        raise UsageError(f"{source} is no run, model folder, preset, pattern or .npy file", fix=near) from error
    return _of_run(run, examples)


def _of_run(run: Path, examples: int) -> AttentionTrace:
    from thrifty.simulators.accelerator.trace_recorder import record_attention
    from thrifty.training.run_setup import open_examples
    from thrifty.training.trained_model import load_trained_model

    model, recipe = load_trained_model(run, plain=False)
    objective, opened = open_examples(recipe)
    about = {"run": run.name, "data": str(recipe.data.source), "objective": recipe.objective.name}
    about["examples"] = str(examples)
    return record_attention(model, opened.held_out.batches(examples, examples), objective.predict, about, run.name)


def _of_folder(folder: Path, examples: int, length: int | None, data: Path | None) -> AttentionTrace:
    import torch

    from thrifty.cli.loaded_model import load_for_sampling
    from thrifty.data.tokenizer import read_tokenizer
    from thrifty.simulators.accelerator.trace_recorder import record_attention

    if data is None or not data.is_file():
        raise UsageError(f"{folder} is a model, which must be given text", fix="--data FILE")
    model, tokenizer, context = load_for_sampling(folder)
    each = trim_to_context(length, context, folder.name)
    tokens = torch.tensor(read_tokenizer(tokenizer).encode(data.read_text(encoding="utf-8")))
    if len(tokens) < each:
        raise UsageError(f"{data} has {len(tokens)} tokens, fewer than an example of {each}", fix="a smaller --length")
    rows = tokens[: len(tokens) // each * each].unflatten(0, (-1, each))[:examples]
    return record_attention(model, [rows], provenance={"folder": folder.name, "data": data.name}, name=folder.name)


def trim_to_context(length: int | None, context: int | None, model: str) -> int:
    """Tokens of an example: as asked for, or 128 where the model reads so many. Raises UsageError for too many."""
    if context is not None and (length or 0) > context:
        raise UsageError(f"{model} reads {context} tokens, not {length}", fix=f"--length {context}")
    return length or min(128, context or 128)


def _of_preset(name: str, examples: int, length: int | None, seed: int) -> AttentionTrace:
    import torch

    from thrifty.models.model_presets import PRESETS, assemble
    from thrifty.simulators.accelerator.trace_recorder import record_attention

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
        raise RefusedError(f"there is no telling what {name} is given", fix="train it, and give the run")
    about = {"preset": name, "values": f"random, seed {seed}", "data": "random"}
    return record_attention(model, [inputs], lambda model, inputs: model(*inputs), about, name)
