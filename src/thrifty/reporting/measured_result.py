"""Measured results: rows for a DataFrame or a CSV file, and charts as PNG, SVG and PDF."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.reporting.printed_result import PrintedResult
from thrifty.reporting.saved_chart import SavedChart

if TYPE_CHECKING:
    from pandas import DataFrame

Rows = list[dict[str, Any]]
"""Rows with values by column. A row may lack columns."""


class MeasuredResult(PrintedResult):
    """Result with measured values. A run has one row per step, a comparison per run, a study per cell, and a sweep per
    trial and rung.
    """

    @property
    def page(self) -> Path:
        """HTML page of the result."""
        raise NotImplementedError

    def rows(self) -> Rows:
        """Return all measured values as rows of numbers and texts by column name."""
        raise NotImplementedError

    def charts(self) -> Mapping[str, Mapping[str, Any]]:
        """Return each chart by name, as Vega-Lite with its data; the first is the most important."""
        raise NotImplementedError

    def records(self) -> "DataFrame":
        """Return the rows as a `pandas.DataFrame`. Raise UsageError without pandas; `to_csv` does not require it."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError("records() requires pandas, which is not installed", fix="pip install pandas") from error
        return pandas.DataFrame(self.rows())

    def to_csv(self, file: str | Path) -> Path:
        """Write the rows as a CSV file and return its path. An existing file is replaced, as by `DataFrame.to_csv`."""
        rows = self.rows()
        text = io.StringIO()
        table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        AtomicFiles().swap_text(Path(file), text.getvalue())
        return Path(file)

    def figure(self, name: str = "") -> SavedChart:
        """Return a chart, which `save` writes as .png, .svg or .pdf. By default the most important chart.

        Raises UsageError for an unknown name, and if nothing has been measured yet.
        """
        charts = self.charts()
        if not charts:
            raise UsageError("there is no chart, because nothing has been measured yet", fix="train or resume first")
        if name:
            refuse_unknown("there is no chart", name, charts)
        return SavedChart(charts[name or next(iter(charts))])


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the numbers and texts of nested tables by dotted name. Lists are left out."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            row |= flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            row[prefix + name] = value
    return row
