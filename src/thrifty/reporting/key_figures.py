"""Key figures of a run, its state, and a sentence that compares the held-out loss with a simple reference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thrifty.reporting.number_format import duration, significant
from thrifty.reporting.run_curves import NOTED, RunCurves, StepColumns, curves_of
from thrifty.reporting.run_record import RunRecord, mapping, number
from thrifty.reporting.run_state import KILLED


@dataclass(frozen=True)
class KeyFigures:
    """Key figures of a run. Memory is in bytes, time in seconds. A figure is None if the folder has no value yet.

    Losses are in the unit that `nats` returns, by default nats per token.
    """

    status: str
    steps: int
    skipped_steps: int
    tokens: float | None
    seconds: float | None
    loss: float | None
    held_out_loss: float | None
    best_held_out_loss: float | None
    unigram_entropy: float | None
    bytes_per_token: float | None
    tokens_per_second: float | None
    """Median over steps. `flops_per_second` is also a median."""
    flops_per_second: float | None
    peak_flops_per_second: float | None
    """Measured peak FLOP rate of matrix multiplication on this machine."""
    peak_memory: float | None
    """Bytes at the peak: of the tensors on a GPU, of the whole process on a CPU."""
    process_memory: float
    """Bytes of the process before the model was built, on a CPU; 0 on a GPU and until the end of the run."""
    predicted_memory: float | None
    """Prediction of `peak_memory`; until the end of the run, of the tensors alone."""
    noise_scale: float | None
    """Latest gradient noise scale in examples. Batches much larger than this scale gain little."""
    batch: float | None
    """Number of examples per step in the recipe."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Latest held-out metrics other than the loss, such as the accuracy as a fraction."""
    label_entropy: float | None = None
    """Entropy of the label frequencies in nats per image."""
    unit: str = "tokens"
    """Unit in which examples are counted, such as tokens or images."""
    loss_in: str = "nats"
    budget_seconds: float | None = None
    """Budget in seconds; None if the recipe's budget is not in seconds."""
    used_seconds: float | None = None
    """Used seconds of that budget."""
    parameters: float | None = None
    """Number of parameters of the model; None for runs on several ranks."""
    cautions: Sequence[str] = ()
    """Cautions that restrict the meaning of the held-out loss."""

    @property
    def nats(self) -> str:
        """Unit of the loss."""
        if self.loss_in != "nats":
            return self.loss_in
        return "nats per token" if self.unit == "tokens" else f"nats per {self.unit.removesuffix('s')}"

    @property
    def share_of_peak(self) -> float | None:
        return _ratio(self.flops_per_second, self.peak_flops_per_second)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory prediction. It is negative if the prediction is too low."""
        ratio = _ratio(self.predicted_memory, self.peak_memory)
        return None if ratio is None else ratio - 1

    @property
    def perplexity(self) -> float | None:
        return None if self.held_out_loss is None else math.exp(min(self.held_out_loss, 700.0))

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Convert nats per token to bits per byte of text. Bits per byte do not depend on the tokenizer."""
        return None if loss is None else _ratio(loss / math.log(2), self.bytes_per_token)


def key_figures(record: RunRecord, curves: RunCurves | None = None) -> KeyFigures:
    """Return the key figures of a run. If steps were recorded after the summary, the step records take precedence."""
    curves = curves or curves_of(record)
    summary, steps, evaluations = record.summary, curves.steps, curves.evaluations
    is_current = bool(summary) and record.last_step <= (number(summary.get("steps")) or 0)
    current = summary if is_current else {}
    held_out, skipped = evaluations.curve("loss"), steps.curve("skipped").values.sum()
    predicted = number(summary.get("predicted_memory"))
    if predicted is None:
        predicted = number(mapping(record.explanation.get("footprint")).get("memory"))
    process = number(current.get("process_memory")) or 0.0
    kept = number(current.get("kept_memory")) or 0.0
    peak = number(current.get("peak_memory"))
    return KeyFigures(
        status=record.state.name,
        steps=int(_first(current, "steps", record.last_step) or 0),
        skipped_steps=int(_first(current, "skipped_steps", skipped) or 0),
        tokens=_first(current, "tokens", steps.curve("tokens").last),
        seconds=_first(current, "seconds", steps.curve("seconds").last),
        loss=_first(current, "loss", steps.curve("loss").last),
        held_out_loss=_first(current, "held_out_loss", held_out.last),
        best_held_out_loss=_first(current, "best_held_out_loss", held_out.lowest),
        unigram_entropy=number(summary.get("unigram_entropy")),
        bytes_per_token=number(summary.get("bytes_per_token")),
        tokens_per_second=steps.curve("tokens_per_second").median,
        flops_per_second=steps.curve("flops_per_second").median,
        peak_flops_per_second=number(summary.get("peak_flops_per_second")),
        peak_memory=None if peak is None else process + peak,
        process_memory=process,
        predicted_memory=None if predicted is None else process + predicted + kept,
        noise_scale=steps.curve(NOTED).last,
        batch=number(mapping(record.recipe.get("data")).get("batch")),
        measured=_measured(summary.get("measured"), evaluations),
        label_entropy=number(summary.get("label_entropy")),
        unit=str(summary.get("unit", "tokens")),
        loss_in=str(summary.get("loss_in", "nats")),
        budget_seconds=number(mapping(record.recipe.get("budget")).get("seconds")),
        used_seconds=number(current.get("used_seconds")),
        parameters=number(summary.get("parameters")),
        cautions=[each for each in summary.get("cautions") or () if isinstance(each, str)],
    )


def verdict(key: KeyFigures) -> str:
    """Return a sentence that compares the held-out loss with the unigram entropy or the label entropy.

    Further sentences are cautions, and state the used budget in seconds of a finished run, or the command that resumes
    a killed run.
    """
    used = "".join(f" Caution: {caution}." for caution in key.cautions)
    if key.status == "finished" and key.budget_seconds and key.used_seconds is not None:
        used += f" It used {duration(key.used_seconds)} of its budget of {duration(key.budget_seconds)}."
    if key.status == KILLED:
        used += f" Its process was killed after step {key.steps:,}; `thrifty resume` continues the run."
    return _verdict_on_loss(key) + used


def _verdict_on_loss(key: KeyFigures) -> str:
    if key.unit != "tokens":
        return _verdict_on_labels(key)
    loss, entropy = key.held_out_loss, key.unigram_entropy
    if loss is None:
        training = f"; the last training loss is {significant(key.loss)} nats per token" if key.loss is not None else ""
        return f"Nothing has been measured on held-out text yet{training}."
    bits = key.bits_per_byte(loss)
    in_bits = f" ({significant(bits)} bits per byte)" if bits is not None else ""
    opening = f"The held-out loss is {significant(loss)} nats per token{in_bits}"
    ending = f"the perplexity is {significant(key.perplexity)}."
    if entropy is None:
        return f"{opening}; {ending}"
    entropy_bits = key.bits_per_byte(entropy)
    unigram = significant(entropy) + (f" ({significant(entropy_bits)})" if entropy_bits is not None else "")
    if loss >= entropy:
        return f"{opening}, not below the unigram entropy of {unigram}: the model has not learned from context yet."
    return f"{opening}, {significant(entropy - loss)} below the unigram entropy of {unigram}; {ending}"


def _verdict_on_labels(key: KeyFigures) -> str:
    """Return a sentence that compares the held-out loss with the loss of label frequencies."""
    loss, entropy = key.held_out_loss, key.label_entropy
    if loss is None:
        training = f"; the last training loss is {significant(key.loss)} {key.nats}" if key.loss is not None else ""
        return f"Nothing has been measured on held-out {key.unit} yet{training}."
    shares = "".join(f", {name} {significant(value, 4)}" for name, value in key.measured.items())
    loss_in = key.nats if key.loss_in == "nats" else f"({key.nats})"
    opening = f"The loss on held-out {key.unit} is {significant(loss)} {loss_in}{shares}"
    if entropy is None:
        return f"{opening}."
    if loss >= entropy:
        return f"{opening}, not below {significant(entropy)} of label frequencies alone: the model has not learned yet."
    return f"{opening}; label frequencies alone have {significant(entropy)}."


def batch_advice(key: KeyFigures) -> str | None:
    """Return a sentence with the batch size above which larger batches gain little; None if it was not measured."""
    if key.noise_scale is None:
        return None
    batch = f" (this batch: {key.batch:,.0f})" if key.batch else ""
    return f"gradient noise scale {significant(key.noise_scale)} examples{batch}: much larger batches gain little"


def _measured(names: Any, evaluations: StepColumns) -> dict[str, float]:
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    last = {name: evaluations.curve(name).last for name in names if name.isidentifier() and name in evaluations.columns}
    return {name: value for name, value in last.items() if value is not None}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _first(summary: Mapping[str, Any], name: str, otherwise: Any) -> float | None:
    value = number(summary.get(name))
    return number(otherwise) if value is None else value
