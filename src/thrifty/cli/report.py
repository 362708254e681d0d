"""`thrifty report`: write the page of a run, comparison, study or sweep, and its values and charts as files."""

from pathlib import Path

import click

from thrifty.core.errors import UsageError


@click.command("report")
@click.argument("run")
@click.option("--csv", type=click.Path(path_type=Path), help="Also write all measured values as this .csv file.")
@click.option(
    "--figure",
    "figures",
    multiple=True,
    metavar="[CHART=]FILE",
    help="Also write a chart, such as loss or memory, as .png, .svg or .pdf.  [default chart: the most important]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the path of the report and its key figures as JSON.")
@click.option("--open/--no-open", "show", default=False, help="Open the page in the browser.  [default: no-open]")
def command(run: str, csv: Path | None, figures: tuple[str, ...], as_json: bool, show: bool) -> None:
    """Write report.html to the folder of RUN.

    RUN is the folder of a run, comparison, study or sweep, or its name under ./runs. It may be unfinished. --csv and
    --figure refuse an existing file.
    """
    import webbrowser

    import thrifty
    from thrifty.cli.verb_output import print_result

    charts = [text.rpartition("=") for text in figures]
    files = [*filter(None, [csv]), *(Path(file) for _, _, file in charts)]
    if existing := [file for file in files if file.exists()]:
        raise UsageError(f"'{existing[0]}' exists already", fix="choose another file name")
    report = thrifty.report(run)
    if csv is not None:
        report.to_csv(csv)
    for name, _, file in charts:
        report.figure(name).save(file)
    print_result(report, as_json)
    if show:
        webbrowser.open(report.page.as_uri())
