"""`thrifty report`: write a run folder as one offline HTML page."""

import click


@click.command("report")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print the path of the report and its key figures as JSON.")
@click.option("--open/--no-open", "show", default=False, help="Open the page in the browser.  [default: no-open]")
def command(run: str, as_json: bool, show: bool) -> None:
    """Write report.html and plots/*.png to the folder of RUN.

    RUN is a run folder, or a name under ./runs. The run may still be training.
    """
    import webbrowser

    import thrifty
    from thrifty.cli.verb_output import print_result

    report = thrifty.report(run)
    print_result(report, as_json)
    if show:
        webbrowser.open(report.page.as_uri())
