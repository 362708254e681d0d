"""Runs for the fit of a scaling law, read from run folders or a table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.planning.scaling_law import FLOP_PER_PARAMETER_AND_TOKEN
from thrifty.planning.scaling_law_fit import TrainedRun
from thrifty.training.run_folder import RunFolder

COLUMNS = {
    "parameters": ("parameters", "Model Size"),
    "tokens": ("tokens", "Training Tokens"),
    "flops": ("flops", "Training FLOP"),
    "loss": ("loss",),
}
"""Accepted column names: names of this package, and names of Epoch AI's table, which was read from a figure of Hoffmann
et al."""

SEPARATORS = ",;\t"
LONGEST_HEADER = 1 << 16
"""Maximum number of characters of a header, because the first line of a device such as /dev/zero never ends."""


def runs_from_folders(paths: Sequence[Path]) -> list[TrainedRun]:
    """Read runs from folders. Raises UsageError for unfinished runs, or for runs with different tokenizers.

    With different tokenizers, losses per token are not comparable.
    """
    runs = [run_from_folder(path) for path in paths]
    tokenizers = {path: _tokenizer(path) for path in paths}
    other = next((path for path in paths if tokenizers[path] != tokenizers[paths[0]]), None)
    if other is not None:
        raise UsageError(
            f"'{other}' and '{paths[0]}' have different tokenizers, so losses per token are not comparable",
            fix="fit only runs with the same tokenizer and text",
        )
    return runs


def _tokenizer(path: Path) -> bytes:
    file = RunFolder.open(path).tokenizer
    return file.read_bytes() if file.exists() else b""


def run_from_folder(path: Path) -> TrainedRun:
    """Read a run from its folder. Raises UsageError if the run has not finished."""
    folder = RunFolder.open(path)
    summary, explanation = folder.read_json("summary"), folder.read_json("explanation")
    try:
        status, tokens, loss = (summary[key] for key in ("status", "tokens", "held_out_loss"))
        parameters = explanation["parameters"]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"summary.json or explanation.json of '{path}' is damaged: {error}", fix=f"leave out {path}"
        ) from error
    if status != "finished" or loss is None:
        raise UsageError(
            f"'{path}' is {status} with a held-out loss of {loss}",
            fix=f"thrifty resume {path}; or leave out this run",
        )
    return TrainedRun(parameters, tokens, loss)


def runs_from_table(path: Path) -> list[TrainedRun]:
    """Read runs from a CSV file with the columns parameters, tokens and loss. Raises UsageError for an invalid file.

    A column flops (6 · parameters · tokens) may replace tokens. Separators are commas, semicolons or tabs. Other
    columns are ignored.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline(LONGEST_HEADER)
            separator = max(SEPARATORS, key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=separator), [])]
            table = csv.DictReader(file, names, delimiter=separator)
            columns = _columns(path, names)
            rows = [(table.line_num + 1, row) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"'{path}' cannot be read: {error}", fix="pass a CSV file with a header line") from error
    return [_run(path, line, row, columns) for line, row in rows]


def _columns(path: Path, header: Sequence[str]) -> dict[str, str]:
    """Return the column of each quantity. Raises UsageError for missing or duplicate columns."""
    matches = {quantity: [name for name in names if name in header] for quantity, names in COLUMNS.items()}
    columns = {quantity: names[0] for quantity, names in matches.items() if names}
    twice = next((name for name in columns.values() if list(header).count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"'{path}' has {list(header).count(twice)} columns {twice!r}", fix="keep one of these columns")
    for quantity in ("parameters", "tokens", "loss"):
        if quantity not in columns and not (quantity == "tokens" and "flops" in columns):
            near = did_you_mean(quantity, header)
            hint = (
                f"rename the column: {near}" if near.startswith("did you mean") else "columns: parameters,tokens,loss"
            )
            raise UsageError(f"'{path}' has no column {quantity!r}", fix=hint)
    return columns


def _run(path: Path, line: int, row: dict[str, str], columns: dict[str, str]) -> TrainedRun:
    try:
        missing = next((quantity for quantity, column in columns.items() if not (row[column] or "").strip()), None)
        if missing is not None:
            raise ValueError(f"{missing} is missing")
        values = {quantity: float(row[column]) for quantity, column in columns.items()}
        if "tokens" not in values:
            values["tokens"] = values["flops"] / (FLOP_PER_PARAMETER_AND_TOKEN * values["parameters"])
        return TrainedRun(values["parameters"], values["tokens"], values["loss"])
    except (ValueError, TypeError, ZeroDivisionError, UsageError) as error:
        what = error.what if isinstance(error, UsageError) else str(error)
        raise UsageError(
            f"line {line} of '{path}': {what}", fix="write positive numbers; or remove the line"
        ) from error
