"""Reader of a run folder. It returns all data of the report as one object, with secrets redacted."""

import json
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from thrifty.core.errors import UsageError, did_you_mean, spelled
from thrifty.core.old_names import rename_origins, rename_recipe, rename_techniques
from thrifty.core.secret_redaction import redact, redact_text
from thrifty.reporting.run_state import RunState, run_state

EVENTS = ("change", "checkpoint", "notice")
RUN_FILES = ("recipe.toml", "records.jsonl", "checkpoints/LATEST")
"""Files that identify a run folder. One of them is sufficient."""
LARGEST = 64 << 20
LARGEST_STEP = 2**53
"""Maximum number of bytes of a file other than the records, and maximum step."""


@dataclass(frozen=True)
class RunRecord:
    """Content of a run folder. Missing and unreadable files are empty; `damage` lists unreadable files."""

    folder: Path
    recipe_text: str
    recipe: Mapping[str, Any]
    origins: Mapping[str, Any]
    environment: Mapping[str, Any]
    explanation: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]
    """Changes, checkpoints and notices, ordered by step."""
    damage: tuple[str, ...]
    """Sentences that describe unreadable files."""
    selection: Mapping[str, Any] = field(default_factory=dict)
    """Selected examples of a pruned run, for `example_gallery.py`. They are not redacted, because redaction could
    damage images that are stored as text.
    """
    pictures: Mapping[str, Any] = field(default_factory=dict)
    """Images of the model's predictions. They are not redacted, for the same reason as `selection`."""
    sample: Mapping[str, Any] = field(default_factory=dict)
    """Generated text of a language model: "step", and "text" or the "reason" why there is none."""
    state: RunState = field(default_factory=RunState)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def extensions(self) -> tuple[str, ...]:
        """Extensions of the budget by `thrifty resume`, such as "+10min"."""
        return tuple(str(event["asked"]) for event in self.events if event["kind"] == "length")

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


def is_event(record: Mapping[str, Any]) -> bool:
    """Return True for a record that the timeline shows."""
    return record["kind"] in EVENTS or (record["kind"] == "length" and "asked" in record)


def find_run(run: str | Path) -> Path:
    """Return the folder of a run from a path, or from a name in ./runs.

    Raises UsageError if there is no such run folder.
    """
    candidates = [Path(run), Path("runs") / run]
    for folder in candidates:
        if is_run_folder(folder):
            return folder
    existing = next((folder for folder in candidates if folder.exists()), None)
    if existing is not None and (kept := existing / "comparison.json").is_file():
        typed = json.loads(kept.read_bytes()).get("environment", {}).get("command", [])
        again = shlex.join(map(str, typed)) or spelled("thrifty compare …", "thrifty.compare(…)")
        raise UsageError(f"'{existing}' is a comparison, not a run", fix=f"the same command continues it: {again}")
    if existing is not None:
        raise UsageError(
            f"'{existing}' is not a run folder: it has none of {', '.join(RUN_FILES)}",
            fix="choose a folder that `thrifty train` created, such as runs/NAME",
        )
    names = [folder.name for folder in Path("runs").glob("*") if is_run_folder(folder)]
    start = spelled("thrifty train text --data my.txt", 'thrifty.train(data="my.txt")')
    raise UsageError(
        f"there is no run {str(run)!r}, neither as a folder nor under runs/",
        fix=did_you_mean(str(run), names) if names else f"train one first: {start}",
    )


def run_folder(run: Any) -> Path:
    """Return the folder of a run, from a run object, a path, or a name under ./runs."""
    place = getattr(run, "folder", run)
    if not isinstance(place, str | Path):
        raise UsageError(
            f"a {type(run).__name__!r} is not a run",
            fix='pass the result of thrifty.train, a run folder, or its name under ./runs: "mine"',
        )
    return find_run(place)


def is_run_folder(folder: Path) -> bool:
    return any((folder / file).is_file() for file in RUN_FILES)


def read_run(folder: Path, records: Sequence[Mapping[str, Any]] | None = None) -> RunRecord:
    """Read a run folder. Raises UsageError if `folder` is not a run folder.

    If the caller has already read the records, `records` replace the content of records.jsonl.
    """
    folder = find_run(str(folder)).resolve()
    damage: list[str] = []
    text, recipe = _read_recipe(folder / "recipe.toml", damage)
    files = {
        name: rename_techniques(redact(_read_object(folder / f"{name}.json", damage)))
        for name in ("origins", "environment", "explanation", "summary")
    }
    files["origins"] = rename_origins(files["origins"])
    if records is None:
        records = _read_records(folder / "records.jsonl", damage)
    kinds = {kind: tuple(record for record in records if record["kind"] == kind) for kind in ("step", "evaluation")}
    return RunRecord(
        folder=folder,
        recipe_text=text,
        recipe=recipe,
        **files,
        selection=_read_object(folder / "selection.json", damage),
        pictures=_read_object(folder / "pictures.json", damage),
        sample=redact(_read_object(folder / "sample.json", damage)),
        steps=kinds["step"],
        evaluations=kinds["evaluation"],
        events=tuple(rename_techniques(redact(record)) for record in records if is_event(record)),
        damage=tuple(damage),
        state=run_state(folder, files["summary"], max((record["step"] for record in kinds["step"]), default=0)),
    )


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object; an empty object for any other value."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects in a JSON list; an empty list for any other value."""
    return [inner for inner in value if isinstance(inner, Mapping)] if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """Return a finite number; None for any other value, for example the loss of a skipped step."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return result if math.isfinite(result) else None


def _read_recipe(path: Path, damage: list[str]) -> tuple[str, dict[str, Any]]:
    if not path.is_file() or _is_too_large(path, damage):
        return "", {}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tables = redact(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        damage.append(f"recipe.toml is not valid TOML ({error}).")
        return redact_text(text), {}
    renamed = rename_recipe(tables)
    return redact_text(text) if renamed == tables else tomli_w.dumps(renamed), renamed


def _is_too_large(path: Path, damage: list[str]) -> bool:
    is_too_large = path.stat().st_size > LARGEST
    if is_too_large:
        damage.append(f"{path.name} is too large to be read.")
    return is_too_large


def _read_object(path: Path, damage: list[str]) -> dict[str, Any]:
    if not path.is_file() or _is_too_large(path, damage):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        damage.append(f"{path.name} is not valid JSON ({error}).")
        return {}
    if not isinstance(value, dict):
        damage.append(f"{path.name} is not a JSON object.")
        return {}
    return value


def _read_records(path: Path, damage: list[str]) -> list[dict[str, Any]]:
    """Return the records by step. If several records have the same kind and step, return the last one."""
    latest: dict[tuple[str, float, str, str], dict[str, Any]] = {}
    unreadable: list[int] = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else []
    for position, line in enumerate(lines, start=1):
        record = parse_record(line)
        if record is not None:
            # one step can have several notices, so the text is part of the key
            same = (record["kind"], record["step"], str(record.get("text")), str(record.get("technique")))
            latest[same] = record
        elif line.strip() and position < len(lines):  # the last line may be incomplete
            unreadable.append(position)
    if unreadable:
        damage.append(
            f"records.jsonl: {len(unreadable)} unreadable lines were skipped, the first is line {unreadable[0]}."
        )
    return sorted(latest.values(), key=lambda record: record["step"])


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Parse one line of records.jsonl; return None if the line is not a record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = number(record.get("step"))
    return None if step is None or abs(step) > LARGEST_STEP else record
