"""`thrifty track`: what a run recorded, written as another tracker has it."""

from pathlib import Path

import click


@click.command("track")
@click.argument("run")
@click.option("--to", "tracker", required=True, metavar="TRACKER", help="tensorboard, mlflow, wandb or trackio.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("tracked"), help="Folder.  [default: tracked]")
@click.option("--watch", is_flag=True, help="Go on while the run does.")
@click.option("--online", is_flag=True, help="Send it to Weights & Biases instead of keeping it for `wandb sync`.")
def command(run: str, tracker: str, out: Path, watch: bool, online: bool) -> None:
    """Write the records of RUN as another tracker's own files.

    RUN is a run folder, or the name of one under ./runs. Training knows nothing of it: the run folder is only read, and
    nothing is sent anywhere unless --online says so. Called again, it continues where it stopped.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.track(run, tracker, out=out, watch=watch, online=online), as_json=False)
