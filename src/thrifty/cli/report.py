"""thrifty report: a run folder as one offline page."""

import click


@click.command("report")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="Print where the report is and its key numbers as JSON.")
@click.option("--open/--no-open", "show", default=False, help="Open the page in the browser.  [default: no-open]")
def command(run: str, as_json: bool, show: bool) -> None:
    """Write report.html and plots/*.png into the folder of RUN.

    RUN is a run folder, or the name of one under ./runs. A run that is still going on can be reported too.
    """
    import webbrowser
    from dataclasses import asdict

    from thrifty.cli.verb_output import print_result
    from thrifty.reporting.key_figures import key_figures, verdict
    from thrifty.reporting.run_page import write_page
    from thrifty.reporting.run_record import find_run, read_run

    record = read_run(find_run(run))
    page = write_page(record)
    key = key_figures(record)
    plots = sorted(str(path) for path in (page.parent / "plots").glob("*.png"))
    derived = {"share_of_peak": key.share_of_peak, "memory_error": key.memory_error, "perplexity": key.perplexity}
    about = {"run": record.name, "report": str(page), "plots": plots, "verdict": verdict(key)}
    facts = {**about, **asdict(key), **derived, "damage": record.damage}
    print_result(facts, lambda: f"{record.name}: {verdict(key)}\n{page}", as_json)
    if show:
        webbrowser.open(page.as_uri())
