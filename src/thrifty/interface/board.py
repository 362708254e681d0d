"""`board`: runs, live curves, studies and technique cards in the browser."""

import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from thrifty import techniques
from thrifty.comparing.saved_comparison import SCHEMA
from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.old_names import rename_comparison
from thrifty.dashboard.board_server import BoardServer, new_token
from thrifty.dashboard.board_site import BoardSite, TechniqueEvidence
from thrifty.experiments.past_results import OWN_RESULTS
from thrifty.interface.technique_profiles import profile_named
from thrifty.reporting import comparison_page


def board(
    runs: str | Path = "runs", *, results: str | Path | None = None, port: int = 8577, open_browser: bool = True
) -> None:
    """Serve web pages until Ctrl-C: the runs of a folder, saved results and the technique cards.

    By default, the pages show the saved results of the folder `results` and Thrifty's own measurements.

    Only this machine can open the pages, and only with the printed address. The address changes at each start. The
    board reads files and never changes a run. With `port=0` the system chooses a free port.

    Raises UsageError if the folder does not exist.

    Example::

        thrifty.board("runs", open_browser=False)  # until Ctrl-C
    """
    folder, kept = Path(runs), (Path("results"), OWN_RESULTS) if results is None else (Path(results),)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {str(folder)!r}", fix="name the folder of your runs: --runs DIR")
    # a listing of all techniques must not run third-party code
    names = techniques.own_names()
    site = BoardSite(
        folder,
        kept,
        lambda: [profile_named(name).as_dict() for name in names],
        lambda: technique_evidence(names, (*kept, folder)),
        page_of,
    )
    with BoardServer(site, new_token(), port) as server, ExitStack() as stack:
        site.warm()
        print(f"{server.address}\nreads {folder}; Ctrl-C stops it", flush=True)
        if open_browser:
            stack.enter_context(_opened(server.address))
        server.serve_forever()


def technique_evidence(names: Sequence[str], folders: Sequence[Path]) -> dict[str, TechniqueEvidence]:
    """Return the measurements of each technique with a verdict on each aspect. A technique declares its exactness."""
    from thrifty.experiments.evidence import Evidence, evidence_by_technique
    from thrifty.machine.machine_info import cpu_model

    found, measured, here = evidence_by_technique(folders), {}, cpu_model()
    for name in names:
        evidence = found.get(name, Evidence())
        chips = {**evidence.verdicts(), "exactness": profile_named(name).numerics}
        machines = evidence.machines()
        is_here = any(machine.startswith(here) for machine in machines)
        chips |= {"measured": "here" if is_here else "elsewhere"} if machines else {"not measured": ""}
        measured[name] = TechniqueEvidence(chips, evidence.sources())
    return measured


def page_of(data: Mapping[str, Any]) -> str | None:
    """Return the offline page of a saved comparison, study, sweep, lottery or list of simulated training runs; None for
    other results, and for results of another version.
    """
    from thrifty.experiments import study_page
    from thrifty.interface.lotteries import LotteryResult
    from thrifty.interface.published_runs_page import published_runs_page
    from thrifty.interface.studies import study_result
    from thrifty.interface.sweeps import SweepResult

    try:
        if data.get("schema") == SCHEMA:
            return comparison_page.render(rename_comparison(data))
        if {"study", "cells"} <= data.keys():
            return study_page.render(study_result(data))
        if {"trials", "definition"} <= data.keys():
            return SweepResult({"status": "running", "folder": data.get("name", "sweep"), **data}).render()
        if "lottery" in data:
            return LotteryResult(data.get("rounds", ()), data.get("folder", "lottery"), data).render()
        return published_runs_page(data) if {"rates", "runs"} <= data.keys() else None
    except (ThriftyError, KeyError, TypeError, ValueError):
        return None


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open the browser with a local page that redirects to the address.

    The page hides the address from other users, who can see the command line of a browser, but cannot read the page.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="board-", suffix=".html") as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><title>Thrifty</title>\n')
        page.flush()
        webbrowser.open(Path(page.name).as_uri())
        yield
