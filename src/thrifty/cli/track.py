"""thrifty track: what a run recorded, written as another tracker has it."""

from pathlib import Path

import click


@click.command("track")
@click.argument("run")
@click.option("--to", "kind", required=True, metavar="TRACKER", help="tensorboard, mlflow, wandb or trackio.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tracked"), help="Folder.  [default: tracked]")
@click.option("--watch", is_flag=True, help="Go on while the run does.")
@click.option("--online", is_flag=True, help="Send it to Weights & Biases instead of keeping it for `wandb sync`.")
def command(run: str, kind: str, out: Path, watch: bool, online: bool) -> None:
    """Write the records of RUN as another tracker's own files.

    RUN is a run folder, or the name of one under ./runs. Training knows nothing of it: the run folder is only read, and
    nothing is sent anywhere unless --online says so. Called again, it goes on where it stopped.
    """
    from thrifty.reporting.run_record import find_run
    from thrifty.trackers.record_follower import track
    from thrifty.trackers.tracker import KINDS

    written = track(find_run(run), kind, out, follow=watch, online=online)
    more = "more records" if written.again else "records"
    click.echo(f"{written.records:,} {more} of {run} in {written.folder}")
    click.echo(f"look at them: {KINDS[kind].format(folder=written.folder)}")
