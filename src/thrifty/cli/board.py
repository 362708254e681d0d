"""thrifty board: a live page over run folders, on this machine alone."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

PORT = 8577


@click.command("board")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.  [default: runs]")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), help="Folder of kept results.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 for any that is free.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in the browser.  [default: open]")
def command(runs: Path, results: Path, port: int, show: bool) -> None:
    """Show runs, their live curves, studies and technique cards in the browser.

    The page is served to this machine alone, to who has the address that is printed; it only reads, and runs know
    nothing of it. Ctrl-C ends it. Each start has another address.
    """
    from thrifty.core.errors import UsageError
    from thrifty.dashboard.board_server import BoardServer, new_token
    from thrifty.dashboard.board_site import BoardSite

    if not runs.is_dir():
        raise UsageError(f"there is no folder {runs}", fix="name the folder of your runs: --runs DIR")
    site = BoardSite(runs, results, _cards, lambda technique: _measured(technique, (results, runs)))
    with BoardServer(site, new_token(), port) as server, ExitStack() as stack:
        site.warm()
        click.echo(f"{server.address}\nreads {runs}; Ctrl-C ends it")
        if show:
            stack.enter_context(_opened(server.address))
        server.serve_forever()


def _cards() -> list[dict[str, Any]]:
    from thrifty import techniques
    from thrifty.cli.technique_card import card_of

    return [card_of(name) for name in techniques.own_names()]  # code of others runs only when its technique is named


def _measured(technique: str, folders: tuple[Path, Path]) -> list[str]:
    from thrifty.experiments.past_results import evidence, study_results

    compared = [result for result in evidence(folders) if result.technique == technique]
    return [result.in_words() for result in [*compared, *study_results(technique, folders)]]


@contextmanager
def _opened(address: str) -> Iterator[None]:
    """Open the browser by a page that leads to the address and that this user alone can read: whoever lists processes
    sees a browser's command line."""
    import tempfile
    import webbrowser

    from thrifty.core.cache_dir import cache_folder

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix="board-", suffix=".html") as page:
        page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}"><title>Thrifty</title>\n')
        page.flush()
        webbrowser.open(Path(page.name).as_uri())
        yield
