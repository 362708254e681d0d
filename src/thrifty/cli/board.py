"""`thrifty board`: a live page over run folders, on this machine alone."""

from pathlib import Path

import click


@click.command("board")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.  [default: runs]")
@click.option("--results", type=click.Path(path_type=Path), default=Path("results"), help="Folder of kept results.")
@click.option("--port", type=click.IntRange(0, 65535), default=8577, show_default=True, help="0 for any that is free.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in the browser.  [default: open]")
def command(runs: Path, results: Path, port: int, show: bool) -> None:
    """Show runs, their live curves, studies and technique cards in the browser.

    The page is served to this machine alone, to who has the address that is printed; it only reads, and runs know
    nothing of it. Ctrl-C ends it. Each start has another address.
    """
    import thrifty

    thrifty.board(runs, results=results, port=port, open_browser=show)
