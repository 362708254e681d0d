"""`thrifty board`: serve web pages of runs, studies and technique cards to this machine."""

from pathlib import Path

import click


@click.command("board")
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.  [default: runs]")
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="Folder of saved results.  [default: results, and Thrifty's own measurements]",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8577, show_default=True, help="0: any free port.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in the browser.  [default: open]")
def command(runs: Path, results: Path | None, port: int, show: bool) -> None:
    """Show runs, their live curves, studies and technique cards in the browser.

    Only this machine can open the pages, and only with the printed address. The address changes at each start. The
    board reads files and never changes a run. Ctrl-C stops the board.
    """
    import thrifty

    thrifty.board(runs, results=results, port=port, open_browser=show)
