"""Summary of a run for the list. It is computed from the end of the records and a few samples, at constant cost."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thrifty.core.old_names import rename_recipe, rename_techniques
from thrifty.core.secret_redaction import redact_text
from thrifty.dashboard.cached_files import CachedFiles
from thrifty.reporting.file_tail import FileTail
from thrifty.reporting.run_curves import CurvePoint, StepColumns
from thrifty.reporting.run_record import mappings, number, parse_record
from thrifty.reporting.run_state import run_state

FROM_END = 1 << 16
"""Number of bytes read at the end of the records. Earlier bytes are skipped."""
SAMPLES = 64
AROUND = 1 << 12
"""Number of bytes read for each sampled loss."""
RECENT = 50
"""Number of steps over which tokens per second are averaged."""


@dataclass(frozen=True)
class RunListRow:
    """Row of the run list. Losses are in the objective's unit, `updated` is in seconds since 1970. Unknown values are
    None.
    """

    name: str
    about: str
    recipe: str
    techniques: tuple[str, ...]
    state: str
    reason: str
    step: int
    steps: int | None
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    updated: float
    sparkline: tuple[CurvePoint, ...]
    """Training loss at sampled steps. Short spikes between samples are not visible."""
    group: str = ""
    """Name of the study, comparison, lottery or sweep to which the run belongs."""
    kind: str = "run"
    members: tuple["RunListRow", ...] = ()
    """Runs of a study, comparison, lottery or sweep."""


class RunSummary:
    """Incremental summary of one run. Not thread-safe."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.files = CachedFiles()
        self.tail = FileTail(folder / "records.jsonl")
        self._sampled: tuple[int, tuple[CurvePoint, ...]] = (-1, ())
        self._forget()

    def _forget(self) -> None:
        self.step: Mapping[str, Any] = {}
        self.held_out: float | None = None
        self.rates: deque[float] = deque(maxlen=RECENT)
        self._restarts = self.tail.restarts

    def refresh(self) -> RunListRow:
        """Return the current row of the run. Missing or damaged files do not raise errors."""
        self._follow()
        recipe = rename_recipe(self.files.toml(self.folder / "recipe.toml"))
        summary = self.files.json_object(self.folder / "summary.json")
        named = mappings(self.files.json_object(self.folder / "explanation.json").get("techniques"))
        step = int(number(self.step.get("step")) or number(summary.get("steps")) or 0)
        state = run_state(self.folder, summary, step)
        rate = median(self.rates) if self.rates else None
        loss = number(self.step.get("loss"))
        return RunListRow(
            name=self.name,
            about=redact_text(str(recipe.get("about", ""))),
            recipe=redact_text(_model_and_data(recipe)),
            techniques=tuple(redact_text(rename_techniques(str(each.get("name", "")))) for each in named),
            state=state.name,
            reason=state.reason,
            step=step,
            steps=_steps(recipe),
            loss=number(summary.get("loss")) if loss is None else loss,
            held_out_loss=number(summary.get("held_out_loss")) if self.held_out is None else self.held_out,
            tokens_per_second=rate,
            updated=self._updated(),
            sparkline=self._sparkline(),
        )

    def _follow(self) -> None:
        lines = [b""]
        while lines:
            if self.tail.size - self.tail.offset > FROM_END:  # at the first refresh, or after a long pause
                self.tail.skip_to(self.tail.size - FROM_END)
                self._forget()
            lines = self.tail.read()
            if self.tail.restarts != self._restarts:
                self._forget()
            for line in lines:
                record = parse_record(line) or {}
                if record.get("kind") == "step":
                    self.step = record
                    if (rate := number(record.get("tokens_per_second"))) is not None:
                        self.rates.append(rate)
                elif record.get("kind") == "evaluation":
                    self.held_out = number(record.get("loss"))

    def _updated(self) -> float:
        times = [0.0]
        for name in ("records.jsonl", "summary.json", "recipe.toml"):
            try:
                times.append((self.folder / name).stat().st_mtime)
            except OSError:
                continue
        return max(times)

    def _sparkline(self) -> tuple[CurvePoint, ...]:
        size = self.tail.size
        if size != self._sampled[0]:
            self._sampled = size, tuple(sampled_losses(self.tail.file, size))
        return self._sampled[1]


def sampled_losses(file: Path, size: int) -> list[CurvePoint]:
    """Return the training loss, by step, at evenly spaced positions in the records. A small file is read completely,
    and its losses are thinned.
    """
    curves = StepColumns(["loss"])
    if not file.is_file():
        return []
    try:
        with file.open("rb") as opened:
            if size <= SAMPLES * AROUND:
                _put_losses(curves, opened.read(SAMPLES * AROUND))
            else:
                for sample in range(SAMPLES):
                    opened.seek(sample * (size - AROUND) // (SAMPLES - 1))
                    _put_losses(curves, opened.read(AROUND), most=1)
    except OSError:
        return []
    return curves.curve("loss").thin(2 * SAMPLES)


def _put_losses(curves: StepColumns, content: bytes, most: int | None = None) -> None:
    """Add the losses of the first `most` steps in a part of the records; by default all losses."""
    count = 0
    for line in content.split(b"\n"):
        record = parse_record(line) if line.startswith(b"{") else None
        if record and record["kind"] == "step" and number(record.get("loss")) is not None:
            curves.put(int(record["step"]), record)
            count += 1
            if count == most:
                break


def _model_and_data(recipe: Mapping[str, Any]) -> str:
    """Return the model and the data of a recipe as text."""
    model, data = recipe.get("model"), recipe.get("data")
    parts = [
        part.get(name)
        for part, name in ((model, "build"), (model, "preset"), (data, "source"))
        if isinstance(part, dict) and isinstance(part.get(name), str)
    ]
    return " · ".join(str(part) for part in parts if part)


def _steps(recipe: Mapping[str, Any]) -> int | None:
    """Return the budget's number of steps, or None if the budget is not in steps."""
    budget = recipe.get("budget")
    steps = number(budget.get("steps")) if isinstance(budget, dict) else None
    return int(steps) if steps else None
