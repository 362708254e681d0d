"""Findings: measured effects of techniques, from `findings/*.toml` in a results folder.

A finding names an aspect, a model and its conditions. It points to the result file with the measured values.
Repeating a benchmark therefore changes the printed values.
"""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thrifty.core.errors import UsageError
from thrifty.experiments.past_results import files_in, shown_path

Aspect = Literal["time", "memory", "data", "quality", "exactness", "prediction"]
FindingVerdict = Literal["better", "equal", "worse", "mixed"]
TOLERANCE = 0.03
"""Maximum relative difference at which two measurements count as equal."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One measured effect of a technique."""

    technique: str
    aspect: Aspect
    verdict: FindingVerdict
    text: str
    """Effect in one sentence or clause, with its values."""
    settings: str = ""
    """Settings of the technique, such as "rank=8"; empty for the defaults."""
    model: str
    device: str
    source: str
    """Result file, or the command that repeats the measurement."""

    def in_words(self) -> str:
        """Return the finding on one line, with its conditions."""
        conditions = [part for part in (self.settings, self.model, self.device) if part]
        source = f": {self.source}" if self.source else ""
        return f"{self.aspect} {self.verdict}: {self.text} ({'; '.join(conditions)}){source}"


def read_findings(folders: Sequence[Path]) -> list[Finding]:
    """Return the findings of all techniques in the folders.

    Raises UsageError if a finding lacks a key, or if its values are not in its result file.
    """
    return [
        _finding(table, file, file.parents[1])
        for file in files_in(folders, "findings/*.toml")
        for table in tomllib.loads(file.read_text(encoding="utf-8")).get("finding", ())
    ]


def _finding(table: dict[str, Any], file: Path, folder: Path) -> Finding:
    try:
        conditions = {key: table.get(key, "") for key in ("settings", "model")}
        if "text" in table:
            return Finding(
                technique=file.stem,
                aspect=table["aspect"],
                verdict=table["verdict"],
                text=table["text"],
                device=table["device"],
                source=table.get("source", ""),
                **conditions,
            )
        data = json.loads((folder / table["file"]).read_bytes()) if "file" in table else {}
        values = list(_values(data, table["values"].split("/"))) if data else table["values"]
        low, high = min(values), max(values)
        bounds = f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"
        return Finding(
            technique=file.stem,
            aspect=table["aspect"],
            verdict=_verdict(low, high, table.get("higher_is_better", False)),
            text=f"{table['of']} {bounds}",
            device=_device(data) or table["device"],
            source=shown_path(folder / table["file"]) if "file" in table else table.get("source", ""),
            **conditions,
        )
    except (KeyError, ValueError, TypeError, OSError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"'{file}': {reason}", fix="see results/README.md for the keys of a finding") from error


def _values(data: Any, path: Sequence[str]) -> Iterator[float]:
    """Yield the numbers at `path`, a sequence of keys. "*" in the path matches every key or index."""
    if not path:
        yield float(data)
        return
    first, *rest = path
    items = data if isinstance(data, dict) else dict(enumerate(data))
    keys = list(items) if first == "*" else [first if isinstance(data, dict) else int(first)]
    for key in keys:
        yield from _values(items[key], rest)


def _verdict(low: float, high: float, higher_is_better: bool) -> FindingVerdict:
    """Return the verdict for the lowest and the highest ratio to the baseline's value."""
    if higher_is_better:
        low, high = 1 / high, 1 / low
    if abs(low - 1) <= TOLERANCE and abs(high - 1) <= TOLERANCE:
        return "equal"
    if high <= 1 + TOLERANCE:
        return "better"
    return "worse" if low >= 1 - TOLERANCE else "mixed"


def _device(data: dict[str, Any]) -> str:
    names = [str(data[key]) for key in ("gpu", "cpu") if data.get(key)]
    cores = f", {data['cores']} cores" if data.get("cores") and names[:1] == [data.get("cpu")] else ""
    return f"{names[0]}{cores}" if names else ""
