"""Records of a run as rows, one per step."""

from typing import Any

from thrifty.reporting.measured_result import Rows, flat
from thrifty.reporting.run_record import RunRecord


def run_rows(record: RunRecord) -> Rows:
    """Return one row per step. Columns that begin with "held_out_" have values at the steps of evaluations."""
    rows: dict[int, dict[str, Any]] = {}
    for each in record.steps:
        rows[each["step"]] = {name: value for name, value in flat(each).items() if name != "kind"}
    for each in record.evaluations:
        measured = {f"held_out_{name}": value for name, value in flat(each).items() if name not in ("kind", "step")}
        rows[each["step"]] = {"step": each["step"], **rows.get(each["step"], {}), **measured}
    return [rows[step] for step in sorted(rows)]
