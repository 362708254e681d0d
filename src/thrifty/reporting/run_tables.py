"""Tables of the report. They convert records to rows of plain text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.reporting.key_figures import KeyFigures
from thrifty.reporting.number_format import MISSING, duration, percent, scaled, significant, whole
from thrifty.reporting.run_curves import CurvePoint, CurveSpan
from thrifty.reporting.run_record import RunRecord, mapping, mappings, number

CHART_ROWS = 24
TIMELINE_ROWS = 300
TECHNIQUE_FIELDS = ("name", "stage", "numerics", "settings", "touched")
"""Fields of a technique that the report copies from the record."""
COMPONENTS = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class TextTable:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    """Indices of number columns, which are right-aligned."""
    note: str = ""


def tiles(key: KeyFigures) -> list[tuple[str, str, str]]:
    """Return the label, value and remark of each key figure."""
    best = f"best {significant(key.best_held_out_loss)}" if key.best_held_out_loss is not None else "none measured yet"
    peak = f"of {scaled(key.peak_flops_per_second, 'FLOP/s')} measured"
    bits = key.bits_per_byte(key.held_out_loss)
    pace = key.seconds / key.steps if key.seconds is not None and key.steps else None
    noise = [("Gradient noise scale", significant(key.noise_scale), "examples: much larger batches gain little")]
    model = [("Parameters", scaled(key.parameters), "of the model")]
    of_text = [("Bits per byte", significant(bits), f"perplexity {significant(key.perplexity)}")]
    last = "at the last evaluation"
    metrics = [(f"Held-out {name}", significant(value, 4), last) for name, value in key.measured.items()]
    return [
        ("Held-out loss", significant(key.held_out_loss), f"{key.nats}, {best}"),
        *(of_text if key.unit == "tokens" else []),
        *metrics,
        ("Steps", whole(key.steps), f"{key.skipped_steps:,} skipped" if key.skipped_steps else "none skipped"),
        (key.unit.capitalize(), scaled(key.tokens), "trained on"),
        ("Training time", duration(key.seconds), f"{duration(pace)} per step" if pace is not None else "not measured"),
        ("Throughput", scaled(key.tokens_per_second), f"{key.unit}/s, median"),
        (
            "Share of matmul peak",
            percent(key.share_of_peak),
            peak if key.peak_flops_per_second else f"{scaled(key.flops_per_second, 'FLOP/s')}, peak not measured",
        ),
        ("Peak memory", scaled(key.peak_memory, "B"), _memory_remark(key)),
        *(model if key.parameters is not None else []),
        *(noise if key.noise_scale is not None else []),
    ]


def techniques(record: RunRecord, key: KeyFigures) -> TextTable:
    columns = ("Technique", "Stage", "Numerics", "Settings", "Modules changed", "Predicted tensors", "FLOPs per step")
    rows = []
    for technique in mappings(record.explanation.get("techniques")):
        before, after = mapping(technique.get("before")), mapping(technique.get("after"))
        name, stage, *others = (_text(technique.get(key)) for key in TECHNIQUE_FIELDS)
        changes = _change(before, after, "memory", "B"), _change(before, after, "flops", "FLOP")
        rows.append((name, stage.replace("_", " "), *others, *changes))
    note = f"Whole run: {scaled(key.peak_memory, 'B')} at the peak; {_memory_remark(key)}."
    return TextTable("Techniques in the order in which they act", columns, rows, note=note)


def predicted_parts(record: RunRecord) -> TextTable:
    """Return the predicted memory of the tensors of each part."""
    parts = [(part, number(mapping(record.explanation.get("footprint")).get(part))) for part in COMPONENTS]
    rows = [(part, scaled(size, "B")) for part, size in parts if size is not None]
    note = "All gradients exist only after the activations are freed, so the peak is below the sum."
    return TextTable("Predicted tensors by part", ("Part", "Bytes"), rows, frozenset({1}), note)


def timeline(record: RunRecord) -> TextTable:
    rows = [
        (whole(event["step"]), "budget" if event["kind"] == "length" else event["kind"], _event(event))
        for event in record.events
    ]
    note = ""
    if len(rows) > TIMELINE_ROWS:
        note = f"The last {TIMELINE_ROWS:,} of {len(rows):,}; records.jsonl has all."
    columns, shown = ("Step", "Kind", "Event"), rows[-TIMELINE_ROWS:]
    return TextTable("Notices, changes and checkpoints", columns, shown, frozenset({0}), note)


def environment(record: RunRecord) -> TextTable:
    rows = [
        (name, scaled(number(value), "B") if name == "memory" and number(value) else _text(value))
        for name, value in record.environment.items()
        if name != "command"
    ]
    return TextTable("Environment of the run", ("Fact", "Value"), rows)


def settings(record: RunRecord) -> TextTable:
    """Return every value of the resolved recipe with its origin."""
    rows = [(path, value, _text(record.origins.get(path, "default"))) for path, value in _leaves(record.recipe)]
    return TextTable("The resolved recipe", ("Setting", "Value", "Origin"), rows)


def curve_table(
    title: str,
    unit: str,
    stretches: Sequence[CurveSpan],
    held_out: Sequence[CurvePoint] = (),
    trained: Sequence[CurvePoint] = (),
) -> TextTable:
    evaluated = {"Held-out": held_out, "Held-out, weights in training": trained}
    evaluated = {column: points for column, points in evaluated.items() if points}
    columns = ["Steps", "Mean", "Lowest", "Highest", *evaluated]
    rows = []
    for span in stretches:
        steps = f"{span.first:,}" if span.first == span.last else f"{span.first:,}–{span.last:,}"
        row = [steps, significant(span.mean), significant(span.low), significant(span.high)]
        rows.append([*row, *(_last_within(points, span.first, span.last) for points in evaluated.values())])
    if not stretches:
        blank = [MISSING] * 3
        for step, _ in held_out[-CHART_ROWS:]:
            rows.append([whole(step), *blank, *(_last_within(points, step, step) for points in evaluated.values())])
    return TextTable(f"{title}, {unit}" if unit else title, columns, rows, frozenset(range(len(columns))))


def _memory_remark(key: KeyFigures) -> str:
    if key.predicted_memory is None:
        return "no prediction"
    predicted = f"predicted {scaled(key.predicted_memory, 'B')}"
    return predicted + ("" if key.memory_error is None else f", {_error(key)}")


def _error(key: KeyFigures) -> str:
    error = key.memory_error or 0.0
    return f"{percent(abs(error))} too {'low' if error < 0 else 'high'}"


def _change(before: Mapping[str, Any], after: Mapping[str, Any], name: str, unit: str) -> str:
    first, then = number(before.get(name)), number(after.get(name))
    if first is None or then is None:
        return MISSING
    if first == then:
        return scaled(then, unit)
    ratio = f" (×{significant(then / first)})" if first else ""
    return f"{scaled(first, unit)} → {scaled(then, unit)}{ratio}"


def _event(event: Mapping[str, Any]) -> str:
    if event["kind"] == "checkpoint":
        return f"{scaled(number(event.get('bytes')), 'B')} in {duration(number(event.get('seconds')))}"
    if event["kind"] == "length":
        return f"resumed with a budget extended by {_text(event['asked']).lstrip('+')}"
    if event["kind"] == "change":
        return f"{_text(event.get('technique'))}: {_text(event.get('reason'))}"
    return _text(event.get("text"))


def _last_within(points: Sequence[CurvePoint], first: float, last: float) -> str:
    inside = [point.value for point in points if first <= point.step <= last]
    return significant(inside[-1]) if inside else ""


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted path and the value of each setting in a recipe. List items are numbered from 0."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, _text(value)


def _text(value: Any) -> str:
    """Return any JSON value as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_text(inner)}" for key, inner in value.items()) or MISSING
    if isinstance(value, list):
        return "; ".join(_text(inner) for inner in value) or MISSING
    if value is None or value == "":
        return MISSING
    return str(value).lower() if isinstance(value, bool) else str(value)
