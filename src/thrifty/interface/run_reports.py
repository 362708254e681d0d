"""Report of a run as an HTML page, and `track`: records of a run as files of an experiment tracker."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from thrifty.core.secret_redaction import redact
from thrifty.interface.run_samples import sample_of_run
from thrifty.reporting.key_figures import KeyFigures, key_figures, verdict
from thrifty.reporting.measured_result import MeasuredResult, Rows
from thrifty.reporting.notebook_view import run_html
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.reporting.run_charts import figures
from thrifty.reporting.run_page import write_page
from thrifty.reporting.run_record import RunRecord, read_run, run_folder
from thrifty.reporting.run_rows import run_rows
from thrifty.trackers.record_follower import track as track_records
from thrifty.trackers.tracker import KINDS
from thrifty.training.checkpoint_index import named_steps


@dataclass(frozen=True, repr=False)
class RunReport(MeasuredResult):
    """HTML page of a run, and its key figures. In a notebook it shows loss and memory."""

    record: RunRecord
    figures: KeyFigures

    @property
    def page(self) -> Path:
        """HTML page of the run."""
        return self.record.folder / "report.html"

    @property
    def summary(self) -> Mapping[str, Any]:
        """Summary of the run, written at its end."""
        return self.record.summary

    @property
    def steps(self) -> tuple[Mapping[str, Any], ...]:
        """Records of all steps."""
        return self.record.steps

    @property
    def verdict(self) -> str:
        """One sentence on the end of the run and its results."""
        return verdict(self.figures)

    def rows(self) -> Rows:
        return run_rows(self.record)

    def charts(self) -> dict[str, Mapping[str, Any]]:
        return charts_of(self.record)

    def as_dict(self) -> dict[str, Any]:
        key, plots = self.figures, sorted(map(str, (self.page.parent / "plots").glob("*.png")))
        derived = {"share_of_peak": key.share_of_peak, "memory_error": key.memory_error, "perplexity": key.perplexity}
        about = {"run": self.record.name, "report": str(self.page), "plots": plots, "verdict": self.verdict}
        return {**about, **asdict(key), **derived, "checkpoints": self.checkpoints, "damage": self.record.damage}

    @property
    def checkpoints(self) -> dict[str, int]:
        """Steps of the "last" and the "best" checkpoint; empty if the run has none."""
        return named_steps(self.record.folder / "checkpoints")

    def __rich__(self) -> RenderableType:
        steps = ", ".join(f"{name} of step {step:,}" for name, step in self.checkpoints.items())
        kept = [f"checkpoints: {steps}"] if steps else []
        return lines(f"{self.record.name}: {self.verdict}", *kept, str(self.page))

    def _repr_html_(self) -> str:
        return run_html(self.record)


def charts_of(record: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Return the charts of a run by name, such as "loss" and "memory"."""
    return {figure.id: figure.titled for figure in figures(record, key_figures(record))}


def report_run(run: Any) -> RunReport:
    """Write the page of a run with a sample of its model, and return the run's key figures. Raises UsageError if the
    run does not exist.
    """
    record = read_run(run_folder(run))
    record = replace(record, sample=redact(sample_of_run(run, record)))
    write_page(record)
    return RunReport(record, key_figures(record))


@dataclass(frozen=True, repr=False)
class TrackerFiles(PrintedResult):
    """Records of a run in the format of an experiment tracker."""

    folder: Path
    records: int
    again: bool
    """True if the folder already contained records."""
    look: str
    """Command that shows the records."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        more = "more records" if self.again else "records"
        return lines(f"{self.records:,} {more} in {self.folder}", f"view them: {self.look}")


def track(
    run: Any, tracker: str, *, out: str | Path = "tracked", watch: bool = False, online: bool = False
) -> TrackerFiles:
    """Write the records of a run in the format of "tensorboard", "mlflow", "wandb" or "trackio".

    The run folder is only read. A second call adds the records that are new since the first call. With `watch=True` the
    call continues until the run ends. Only `online=True` (Weights & Biases) sends data over the network.

    Raises UsageError if the tracker is unknown or its package is not installed.

    Example::

        thrifty.track("runs/mine", "tensorboard")
    """
    written = track_records(run_folder(run), tracker, Path(out), follow=watch, online=online)
    look = KINDS[tracker].format(folder=written.folder)
    return TrackerFiles(Path(written.folder), written.records, written.again, look)
