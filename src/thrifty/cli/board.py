"""thrifty board: a live page over run folders, on this machine alone."""

from pathlib import Path
from typing import Any

import click

PORT = 8577


@click.command("board")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.  [default: runs]")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), help="Folder of kept results.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 for any that is free.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in the browser.  [default: open]")
@click.option("--new-token", is_flag=True, help="Make the address that was used so far worthless.")
def command(runs: Path, results: Path, port: int, show: bool, new_token: bool) -> None:
    """Show runs, their live curves, studies and technique cards in the browser.

    The page is served to this machine alone, to who has the address that is printed; it only reads, and runs know
    nothing of it. Ctrl-C ends it. The address stays the same, so that a page that is open finds the board again.
    """
    import webbrowser

    from thrifty.core.errors import UsageError
    from thrifty.dashboard.board_server import BoardServer
    from thrifty.dashboard.board_site import BoardSite

    if not runs.is_dir():
        raise UsageError(f"there is no folder {runs}", fix="name the folder of your runs: --runs DIR")
    site = BoardSite(runs, results, _cards, lambda technique: _measured(technique, (results, runs)))
    with BoardServer(site, _token(new_token), port) as server:
        site.warm()
        click.echo(f"{server.address}\nreads {runs}; Ctrl-C ends it")
        if show:
            webbrowser.open(server.address)
        server.serve_forever()


def _cards() -> list[dict[str, Any]]:
    from thrifty import techniques
    from thrifty.cli.technique_card import card_of

    return [card_of(name) for name in techniques.own_names()]  # code of others runs only when its technique is named


def _measured(technique: str, folders: tuple[Path, Path]) -> list[str]:
    from thrifty.experiments.past_results import evidence, study_results

    compared = [result for result in evidence(folders) if result.technique == technique]
    return [result.in_words() for result in [*compared, *study_results(technique, folders)]]


def _token(renewed: bool) -> str:
    """The token of this user, kept where only they can read it."""
    import os

    from thrifty.core.cache_dir import cache_folder
    from thrifty.dashboard.board_server import new_token

    file = cache_folder() / "board-token"
    if renewed:
        file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        kept = file.stat()
        if kept.st_uid != os.getuid() or kept.st_mode & 0o077 or kept.st_size < 32:
            return new_token()
        return file.read_text().strip()
    with os.fdopen(descriptor, "w") as opened:
        opened.write(token := new_token())
    return token
