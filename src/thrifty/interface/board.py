"""`board`: runs, live curves, studies and technique cards in the browser."""

import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from thrifty import techniques
from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import UsageError
from thrifty.dashboard.board_server import BoardServer, new_token
from thrifty.dashboard.board_site import BoardSite
from thrifty.interface.technique_profiles import profile_of, show


def board(
    runs: str | Path = "runs", *, results: str | Path = "results", port: int = 8577, open_browser: bool = True
) -> None:
    """Serve a page of the runs below a folder, of kept `results` and of technique cards, until Ctrl-C.

    The page is served to this machine alone, to who has the address that is printed; it only reads, and runs know
    nothing of it. `port=0` takes any that is free. Each start has another address.

    Raises UsageError if there is no such folder.

    Example::

        thrifty.board("runs", open_browser=False)  # until Ctrl-C
    """
    folder, kept = Path(runs), Path(results)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", fix="name the folder of your runs: --runs DIR")
    # code of others runs only when its technique is named
    names = techniques.own_names()
    site = BoardSite(
        folder,
        kept,
        lambda: [profile_of(techniques.find(name)).as_dict() for name in names],
        lambda technique: show(technique, results=(kept, folder)).measured(),
    )
    with BoardServer(site, new_token(), port) as server, ExitStack() as stack:
        site.warm()
        print(f"{server.address}\nreads {folder}; Ctrl-C ends it", flush=True)
        if open_browser:
            stack.enter_context(_opened(server.address))
        server.serve_forever()


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open the browser by a page that leads to the address and that this user alone can read: whoever lists processes
    sees a browser's command line."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="board-", suffix=".html") as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><title>Thrifty</title>\n')
        page.flush()
        webbrowser.open(Path(page.name).as_uri())
        yield
