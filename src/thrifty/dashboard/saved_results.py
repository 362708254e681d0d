"""Saved results (JSON files in folders of results/) as tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.core.secret_redaction import redact
from thrifty.dashboard.cached_files import CachedFiles
from thrifty.reporting import comparison_page
from thrifty.reporting.number_format import MISSING, scaled, significant
from thrifty.reporting.result_page import FACTS
from thrifty.reporting.run_record import mapping, mappings, number
from thrifty.reporting.run_tables import TextTable

MOST = 2_000
"""Maximum number of listed files."""
COLUMNS, ROWS = 14, 400
"""Maximum numbers of columns and rows in a table."""
DEEPEST = 3
"""Maximum nesting depth of objects with their own tables. The depth is the number of commas in the caption."""
Labelled = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class SavedResult:
    """One result file. `name` is its path below the folder, without suffix. It identifies the result in a query."""

    name: str
    group: str
    """First folder of the path: studies, cluster, hardware, benchmarks, comparisons, …."""
    about: str
    outcome: str
    """Short text from the function `outcome`."""
    data: Mapping[str, Any]


def saved_results(folders: Sequence[Path], files: CachedFiles) -> list[SavedResult]:
    """Return all readable results, sorted by name. If several folders have a result, the first of them is used."""
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.json"))[:MOST]:
            paths.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    results = []
    for name, path in sorted(paths.items()):
        data = redact(files.json_object(path))
        if data:
            results.append(SavedResult(name, name.partition("/")[0], description(data), outcome(data), data))
    return results


def description(data: Mapping[str, Any]) -> str:
    """Return the sentence on a result that its file or its page has, or an empty text."""
    if "about" in data:
        return str(data["about"])
    try:
        return comparison_page.about(data)
    except (AttributeError, KeyError, TypeError):  # not a comparison, or a damaged one
        return ""


def tables(data: Mapping[str, Any]) -> list[TextTable]:
    """Return the tables of a result file.

    For a study, the tables are expectations and means. For any other file, the tables are lists and mappings of similar
    objects. Facts on the machine are left out.
    """
    study = "summary" in data and "definition" in data
    return list(_study(data)) if study else list(_generic_tables(data, ""))


def _study(data: Mapping[str, Any]) -> Iterator[TextTable]:
    expected = mappings(data.get("expectations"))
    if expected:
        rows = [
            (
                _cell(each.get("sentence")),
                _cell(each.get("verdict")),
                f"{each.get('held')} of {each.get('seeds')} seeds",
            )
            for each in expected
        ]
        yield TextTable("Expectations", ("Expectation", "Verdict", "Holds in"), rows)
    numbers = {case: values for case, values in mapping(data["summary"]).items() if isinstance(values, dict)}
    every = list(dict.fromkeys(name for values in numbers.values() for name in values))
    names = every[:COLUMNS]
    rows = [[case, *(_estimate(values.get(name)) for name in names)] for case, values in list(numbers.items())[:ROWS]]
    note = f"Means over seeds, ± half-width of the 95 % interval. {_left_out(every[COLUMNS:], len(numbers))}".strip()
    yield TextTable("Means by case", ["Case", *names], rows, frozenset(range(1, len(names) + 1)), note)


def _estimate(estimate: Any) -> str:
    if not isinstance(estimate, dict):
        return MISSING
    mean, half = number(estimate.get("mean")), number(estimate.get("half_width"))
    if mean is None:
        return "never"
    return significant(mean) if half is None else f"{significant(mean)} ± {significant(half)}"


def _generic_tables(data: Mapping[str, Any], path: str) -> Iterator[TextTable]:
    """Yield a table for each list or mapping of objects. Nested lists and mappings have their own tables."""
    shown = {name: value for name, value in data.items() if name not in (*FACTS, "command")}
    single = [(name, _cell(value)) for name, value in shown.items() if not _is_deep(value)]
    if single:
        yield TextTable(path or "Values", ("Name", "Value"), single[:ROWS], note=_left_out((), len(single)))
    for name, value in data.items():
        caption = f"{path}, {name}" if path else name
        inner = list(value.items()) if isinstance(value, dict) else list(enumerate(_list(value), start=1))
        objects = [(str(label), each) for label, each in inner if isinstance(each, dict)]
        if name in ("environment", "definition"):
            continue
        if not objects:
            yield from _generic_tables(value, caption) if isinstance(value, dict) else ()
            continue
        is_deep = len(objects) < len(inner) or any(_is_deep(each) for _, row in objects for each in row.values())
        if is_deep and isinstance(value, dict) and path.count(",") < DEEPEST:
            yield from _generic_tables(value, caption)
        else:
            yield _rows(caption, objects, labelled=isinstance(value, dict))


def _rows(caption: str, objects: Labelled, labelled: bool) -> TextTable:
    """Return a table with one row per object. Columns with nested objects are omitted."""
    names = list(dict.fromkeys(column for _, row in objects for column in row))
    columns = [column for column in names if not any(_is_deep(row.get(column)) for _, row in objects)][:COLUMNS]
    rows = [
        [*([label] if labelled else []), *(_cell(row.get(column)) for column in columns)]
        for label, row in objects[:ROWS]
    ]
    numeric = {place for place, column in enumerate(columns, start=labelled) if _is_numeric(objects, column)}
    note = _left_out([column for column in names if column not in columns], len(objects))
    return TextTable(caption, [*([""] if labelled else []), *columns], rows, frozenset(numeric), note)


def _left_out(columns: Sequence[str], rows: int) -> str:
    left = [", ".join(columns)] if columns else []
    left += [f"{rows - ROWS:,} more rows"] if rows > ROWS else []
    return f"Not shown: {'; '.join(left)}." if left else ""


def _is_deep(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, dict | list) for each in value))


def _is_numeric(objects: Labelled, column: str) -> bool:
    return all(number(row[column]) is not None for _, row in objects if row.get(column) is not None)


def outcome(data: Mapping[str, Any]) -> str:
    """Return the number of expectations of a study that hold, the verdicts of a comparison, or the status of any other
    result.
    """
    verdicts = [each.get("verdict") for each in mappings(data.get("expectations"))]
    if verdicts:
        return f"{verdicts.count('holds')} of {len(verdicts)} expectations hold"
    variants = mapping(mapping(data.get("outcome")).get("variants"))
    words = {label: mapping(mapping(variant).get("verdict")).get("verdict") for label, variant in variants.items()}
    return "; ".join(f"{label}: {word}" for label, word in words.items() if word) or str(data.get("status", ""))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: MISSING}[value]
    if isinstance(value, int | float):
        finite = number(value)
        large = finite is not None and abs(finite) >= 1e6
        return scaled(finite) if large else f"{value:,}" if isinstance(value, int) else significant(finite)
    if isinstance(value, list):
        return ", ".join(_cell(each) for each in value)
    return str(value)
