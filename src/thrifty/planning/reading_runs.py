"""Runs to fit a scaling law to, from run folders or from a table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.planning.law_fitting import TrainedRun
from thrifty.planning.scaling_law import FLOP_PER_PARAMETER_AND_TOKEN
from thrifty.training.run_folder import RunFolder

COLUMNS = {
    "parameters": ("parameters", "Model Size"),
    "tokens": ("tokens", "Training Tokens"),
    "flops": ("flops", "Training FLOP"),
    "loss": ("loss",),
}
"""Names of a column: ours, and that of the table which Epoch AI read off the figure of Hoffmann et al."""


def run_from_folder(path: Path) -> TrainedRun:
    """Raises UsageError where the run has not finished."""
    folder = RunFolder.open(path)
    summary, explanation = folder.read_json("summary"), folder.read_json("explanation")
    if summary["status"] != "finished" or summary["held_out_loss"] is None:
        raise UsageError(
            f"{path} is {summary['status']} with a held-out loss of {summary['held_out_loss']}",
            fix=f"leave it out, or finish it: thrifty resume {path}",
        )
    return TrainedRun(explanation["parameters"], summary["tokens"], summary["held_out_loss"])


def runs_from_table(path: Path) -> list[TrainedRun]:
    """Rows of a CSV file with the columns parameters, tokens and loss; flops = 6 N D may stand in place of tokens."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            columns = _columns(path, table.fieldnames or ())
            rows = [(table.line_num, row) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="give a CSV file with a header line") from error
    return [_run(path, line, row, columns) for line, row in rows]


def _columns(path: Path, header: Sequence[str]) -> dict[str, str]:
    """The column in which each quantity stands."""
    found = {quantity: [name for name in names if name in header] for quantity, names in COLUMNS.items()}
    columns = {quantity: names[0] for quantity, names in found.items() if names}
    for quantity in ("parameters", "tokens", "loss"):
        if quantity not in columns and not (quantity == "tokens" and "flops" in columns):
            near = did_you_mean(quantity, header)
            hint = (
                f"rename the column: {near}" if near.startswith("did you mean") else "columns: parameters,tokens,loss"
            )
            raise UsageError(f"{path} has no column {quantity!r}", fix=hint)
    return columns


def _run(path: Path, line: int, row: dict[str, str], columns: dict[str, str]) -> TrainedRun:
    try:
        values = {quantity: float(row[column]) for quantity, column in columns.items()}
        if "tokens" not in values:
            values["tokens"] = values["flops"] / (FLOP_PER_PARAMETER_AND_TOKEN * values["parameters"])
        return TrainedRun(values["parameters"], values["tokens"], values["loss"])
    except (ValueError, TypeError, ZeroDivisionError, UsageError) as error:
        what = error.what if isinstance(error, UsageError) else str(error)
        raise UsageError(f"line {line} of {path}: {what}", fix="give positive numbers, or remove the line") from error
