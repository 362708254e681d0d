"""Site of the board. It maps a path and a query to a page, a part of a page, or 404. It does not use sockets."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple
from urllib.parse import quote

from thrifty.core.secret_redaction import redact, redact_text
from thrifty.dashboard import board_pages
from thrifty.dashboard.benchmark_page import benchmark_page
from thrifty.dashboard.cached_files import CachedFiles
from thrifty.dashboard.page_responses import PageResponse, Query, changed_parts, figure_data
from thrifty.dashboard.run_listing import RunListing
from thrifty.dashboard.run_summary import RunListRow
from thrifty.dashboard.run_watcher import RunWatcher
from thrifty.dashboard.saved_results import description, outcome, saved_results
from thrifty.dashboard.technique_cards import TechniqueCard, card_from
from thrifty.reporting.chart_renderer import VEGA_LITE, vega_bundle
from thrifty.reporting.color_theme import chart_look, css_variable
from thrifty.reporting.key_figures import key_figures
from thrifty.reporting.run_charts import ChartTheme, figures, overlaid, specification
from thrifty.reporting.run_page import repeat_command, scripts_policy
from thrifty.reporting.run_record import read_run
from thrifty.reporting.run_state import RUNNING
from thrifty.reporting.run_tables import environment, predicted_parts, settings

LARGEST_PAGE = 64 << 20
"""Maximum number of bytes of a shown offline page."""
MOST_OVERLAID = 6
"""Maximum number of runs in one chart."""
READ_SECONDS = 0.4
"""Maximum time in seconds for reading records in one response. A long run requires several responses."""
FRESH = 60.0
"""Seconds after its last record during which a run counts as active, even if its folder is not locked."""
SIMULATIONS = ("cluster", "hardware")
"""Folders of results that contain simulations."""
SCRIPT = "text/javascript; charset=utf-8"
ListedResult = tuple[str, str, str, str, str]
"""Name, address, description, outcome, and address of the offline page (or "") of a study or comparison."""


class TechniqueEvidence(NamedTuple):
    """Measurements of a technique."""

    chips: Mapping[str, str]
    """Verdict by aspect, such as "memory" and "time"."""
    lines: Sequence[tuple[str, str]]
    """One sentence per measurement, and its file, or the command that repeats it."""


class BoardSite:
    """Site for a folder of runs and folders of saved results.

    `profiles` returns the profile of each technique (`technique_cards.card_from`) and may take seconds. `evidence`
    returns the measurements of each technique. `page_of` returns the offline page of a result, or None if the kind of
    result has no page.
    """

    def __init__(
        self,
        runs: Path,
        results: Sequence[Path],
        profiles: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        evidence: Callable[[], Mapping[str, TechniqueEvidence]] = dict,
        page_of: Callable[[Mapping[str, Any]], str | None] = lambda data: None,
    ):
        self.watch, self.results, self.files = RunWatcher(runs), results, CachedFiles()
        self.profiles, self.evidence, self.page_of = profiles, evidence, page_of
        self._cards: dict[str, TechniqueCard] = {}
        self._cards_lock = Lock()
        self._routes: dict[str, Callable[[Query], PageResponse | None]] = {
            "": self.runs_page,
            "run": self.run_page,
            "curves": self.curves_page,
            "api/curves": self.curves_now,
            "studies": self.studies_page,
            "folder": self.folder_page,
            "result": self.result_page,
            "simulations": self.simulations_page,
            "techniques": self.techniques_page,
            "technique": self.technique_page,
            "page": self.offline_page,
            "api/runs": self.runs_now,
            "api/run": self.run_now,
            "board.css": lambda query: PageResponse(board_pages.style().encode(), "text/css; charset=utf-8"),
            "board.js": lambda query: PageResponse(board_pages.script().encode(), SCRIPT),
            "vega.js": lambda query: PageResponse(vega_bundle().encode(), SCRIPT, lasting=True),
        }

    def warm(self) -> None:
        """Prepare slow page parts in a background thread."""
        Thread(
            target=lambda: (vega_bundle(), specification(ChartTheme(), ("smoothed",))),
            daemon=True,
        ).start()

    def respond(self, path: str, query: Query) -> PageResponse:
        """Return the response for a path without the token; 404 if the page does not exist."""
        route = self._routes.get(path)
        response = route(query) if route else None
        return response or PageResponse(b"There is no such page.\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

    def runs_page(self, query: Query) -> PageResponse:
        sort = _sort(query)
        return self._page("runs", "./", runs=board_pages.sorted_rows(self._rows(), sort), sort=sort)

    def runs_now(self, query: Query) -> PageResponse:
        rows = board_pages.sorted_rows(self._rows(), _sort(query))
        parts = {name: board_pages.part("run_list_parts.html", name, rows) for name in ("rows", "count")}
        active = any(_moves(row) for row in rows)
        return changed_parts({"moving": active, "share": 1.0}, query, _digest(parts), lambda: {"parts": parts})

    def _rows(self) -> list[RunListRow]:
        """Return the rows of the run list. The runs of a study, comparison, lottery or sweep are folded."""
        groups = [entry for entry in self.watch.entries() if entry.kind != "run"]
        named = [(entry.name, entry.kind, self._listed_folder(entry)[3] or entry.kind) for entry in groups]
        return board_pages.folded(self.watch.rows(), named)

    def run_page(self, query: Query) -> PageResponse | None:
        entry = self._entry(query, "run")
        if entry is None:
            return None
        record = read_run(entry.path, records=())
        return self._page(
            "run",
            "./",
            row=self.watch.row(entry),
            record=record,
            parts=predicted_parts(record),
            settings=settings(record),
            environment=environment(record),
            repeat=repeat_command(record),
            has_page=(entry.path / "report.html").is_file(),
            look=json.dumps(chart_look(css_variable)),
            vega=VEGA_LITE,
        )

    def run_now(self, query: Query) -> PageResponse | None:
        entry = self._entry(query, "run")
        if entry is None:
            return None
        row = self.watch.row(entry)
        with self.watch.index(entry, READ_SECONDS) as index:
            share = index.share
            version = f"{index.version}-{share == 1}-{row.state}"

            def update() -> dict[str, Any]:
                parts = {"state": board_pages.part("run_parts.html", "head", row)}
                if share < 1:  # key figures of a run that is only partly read would be wrong
                    return {"parts": parts}
                record = index.record()
                key = key_figures(record, index.curves)
                parts |= board_pages.run_parts(record, key)
                return {
                    "parts": parts,
                    "figures": [figure_data(each) for each in figures(record, key, index.curves)],
                }

            return changed_parts({"moving": _moves(row), "share": share}, query, version, update)

    def _named(self, query: Query) -> list[RunListing]:
        """Return the runs whose names the query lists, one a line, in a fixed order."""
        names = sorted(set(query.get("names", "").split("\n")))[:MOST_OVERLAID]
        entries = {entry.name: entry for entry in self.watch.entries() if entry.kind == "run"}
        return [entries[name] for name in names if name in entries]

    def curves_page(self, query: Query) -> PageResponse | None:
        entries = self._named(query)
        if not entries:
            return None
        rows = [self.watch.row(entry) for entry in entries]
        address = f"api/curves?names={quote(chr(10).join(entry.name for entry in entries), errors='replace')}"
        look = json.dumps(chart_look(css_variable))
        return self._page("curves", "./", rows=rows, address=address, look=look, vega=VEGA_LITE)

    def curves_now(self, query: Query) -> PageResponse | None:
        entries = self._named(query)
        if not entries:
            return None
        moving = any(_moves(self.watch.row(entry)) for entry in entries)
        with ExitStack() as stack:
            indexes = {entry.name: stack.enter_context(self.watch.index(entry, READ_SECONDS)) for entry in entries}
            share = min(index.share for index in indexes.values())
            version = f"{[index.version for index in indexes.values()]}-{share == 1}"

            def update() -> dict[str, Any]:
                curves = {name: index.curves for name, index in indexes.items()}
                return {"figures": [figure_data(each) for each in overlaid(curves)] if share == 1 else []}

            return changed_parts({"moving": moving, "share": share}, query, version, update)

    def studies_page(self, query: Query) -> PageResponse:
        local = [self._listed_folder(entry) for entry in self.watch.entries() if entry.kind != "run"]
        saved: dict[str, list[ListedResult]] = {}
        for each in saved_results(self.results, self.files):
            if each.group not in SIMULATIONS:
                row = (each.name.removeprefix(f"{each.group}/"), _at("result", each.name), each.about, each.outcome, "")
                saved.setdefault(each.group, []).append(row)
        # results with verdicts come before timings
        groups = sorted(saved.items(), key=lambda group: (group[0] == "benchmarks", group[0]))
        return self._page("studies", "studies", local=local, groups=groups)

    def _listed_folder(self, entry: RunListing) -> ListedResult:
        data = redact(self.files.json_object(entry.path / f"{entry.kind}.json"))
        offline = _at("page", entry.name) if (entry.path / "report.html").is_file() else ""
        return entry.name, _at("folder", entry.name), description(data) or entry.kind, outcome(data), offline

    def folder_page(self, query: Query) -> PageResponse | None:
        entry = self._entry(query, "study", "comparison", "lottery", "sweep")
        if entry is None:
            return None
        name, _, about, _, _ = self._listed_folder(entry)
        data = redact(self.files.json_object(entry.path / f"{entry.kind}.json"))
        data = {**data, "folder": name} if data else {}
        description = "" if about == entry.kind else about
        return self._result(data, name, entry.kind, description, here="studies")

    def result_page(self, query: Query) -> PageResponse | None:
        result = next(
            (each for each in saved_results(self.results, self.files) if each.name == query.get("name")), None
        )
        if result is None:
            return None
        here = "simulations" if result.group in SIMULATIONS else "studies"
        return self._result(result.data, result.name, result.group, result.about, here)

    def _result(self, data: Mapping[str, Any], name: str, kind: str, about: str, here: str) -> PageResponse:
        """Return the page of a result in the board's frame."""
        page = self.page_of(data) or benchmark_page(data, name, kind, about)
        return PageResponse(board_pages.framed(page, here).encode(errors="replace"))

    def simulations_page(self, query: Query) -> PageResponse:
        results = [each for each in saved_results(self.results, self.files) if each.group in SIMULATIONS]
        rows = [(each.name, _at("result", each.name), each.about, each.outcome, "") for each in results]
        return self._page("simulations", "simulations", rows=rows)

    def techniques_page(self, query: Query) -> PageResponse:
        chips = {name: measured.chips for name, measured in self.evidence().items()}
        return self._page("techniques", "techniques", cards=list(self.cards().values()), chips=chips)

    def technique_page(self, query: Query) -> PageResponse | None:
        card = self.cards().get(query.get("name", ""))
        if card is None:
            return None
        used = [row for row in self.watch.rows() if card.name in row.techniques]
        measured, places = self.evidence().get(card.name, TechniqueEvidence({}, ())), self._addresses()
        evidence = [(redact_text(line), redact_text(source), places.get(source, "")) for line, source in measured.lines]
        return self._page("technique", "techniques", card=card, chips=measured.chips, evidence=evidence, used=used)

    def _addresses(self) -> dict[str, str]:
        """Return the address of the page of each result file."""
        results = {
            str(Path(place) / f"{each.name}.json"): _at("result", each.name)
            for each in saved_results(self.results, self.files)
            for folder in self.results
            for place in (folder, folder.name)  # evidence names Thrifty's own results relative to their parent
        }
        entries = [entry for entry in self.watch.entries() if entry.kind != "run"]
        return results | {str(entry.path / f"{entry.kind}.json"): _at("folder", entry.name) for entry in entries}

    def offline_page(self, query: Query) -> PageResponse | None:
        """Return a page stored in a folder, sandboxed. Only the scripts of reports run, and they load nothing."""
        entry = self._entry(query)
        page = entry.path / "report.html" if entry else None
        if page is None or not page.is_file() or page.stat().st_size > LARGEST_PAGE:
            return None
        return PageResponse(page.read_bytes(), policy=f"sandbox allow-scripts; {scripts_policy()}")

    def cards(self) -> dict[str, TechniqueCard]:
        with self._cards_lock:
            if not self._cards:
                self._cards = {card.name: card for card in map(card_from, self.profiles())}
            return self._cards

    def _entry(self, query: Query, *kinds: str) -> RunListing | None:
        entry = self.watch.find(query.get("name", ""))
        return entry if entry and (not kinds or entry.kind in kinds) else None

    def _page(self, template: str, here: str, **values: Any) -> PageResponse:
        folders = {"folder": self.watch.runs, "results": self.results[0]}
        return PageResponse(board_pages.page(template, here=here, **folders, **values).encode(errors="replace"))


def _digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _moves(row: RunListRow) -> bool:
    return row.state == RUNNING or time.time() - row.updated < FRESH


def _sort(query: Query) -> str:
    column = query.get("sort", "")
    return column if column in board_pages.SORTS else board_pages.UNSORTED


def _at(page: str, name: str) -> str:
    return f"{page}?name={quote(name, errors='replace')}"
