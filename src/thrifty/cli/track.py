"""`thrifty track`: write the records of a run in the format of an experiment tracker."""

from pathlib import Path

import click


@click.command("track")
@click.argument("run")
@click.option("--to", "tracker", required=True, metavar="TRACKER", help="tensorboard, mlflow, wandb or trackio.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("tracked"), help="Folder to write to.  [default: tracked]"
)
@click.option("--watch", is_flag=True, help="Continue until the run ends.")
@click.option(
    "--online", is_flag=True, help="Send records to Weights & Biases instead of writing files for `wandb sync`."
)
def command(run: str, tracker: str, out: Path, watch: bool, online: bool) -> None:
    """Write the records of RUN in the format of an experiment tracker.

    RUN is a run folder, or a name under ./runs. The run folder is only read. Only --online sends data over the network.
    A second call adds the new records.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result

    print_result(thrifty.track(run, tracker, out=out, watch=watch, online=online), as_json=False)
