"""Printing of results by verbs."""

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from thrifty.reporting.printed_result import PrintedResult


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def print_result(result: "PrintedResult", as_json: bool, quiet: bool = False) -> None:
    """Print what a public function returns, as JSON or as text."""
    from thrifty.reporting.printed_result import print_to_terminal

    if as_json:
        print_json(result.as_dict())
    elif not quiet:
        print_to_terminal(result)


def print_words(value: Any, words: Callable[[], str | None], as_json: bool, quiet: bool = False) -> None:
    """Print a result as JSON, or as the text that `words` returns or prints itself."""
    if as_json:
        print_json(value)
    elif not quiet and (text := words()) is not None:
        click.echo(text)


def wide_console() -> "Console":
    """As wide as a terminal; where there is none, wide enough for tables."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def open_table(*columns: str) -> "Table":
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)


def progress(quiet: bool = False, prefix: str = "") -> Callable[[str], None]:
    """Return a function that prints progress to standard error, or does nothing if `quiet`."""
    return (lambda text: None) if quiet else (lambda text: click.echo(prefix + text, err=True))


def print_summary(summary: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """The end of a run in a few lines: how it ended, what was reached, where it is kept. Only rank 0 tells."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(summary)
        return
    if quiet:
        return
    loss, unigram = summary.get("held_out_loss"), summary.get("unigram_entropy")
    budget = f" of the {summary['budget_seconds']:g} s of its budget" if "budget_seconds" in summary else ""
    click.echo(f"{summary['status']} after {summary['steps']:,} steps, {summary['seconds']:.0f} s of training{budget}")
    if loss is not None and unigram is not None:
        size = summary["bytes_per_token"]
        bits = f" ({loss / math.log(2) / size:.2f} bits/byte)" if size else ""
        click.echo(f"held-out loss {loss:.3f} nats/token{bits}; unigram entropy {unigram:.3f} nats/token")
        if summary.get("held_out_loss_at_start") is not None:
            click.echo(f"before the first step it was {summary['held_out_loss_at_start']:.3f} nats/token")
    measured = "".join(f", {name} {value:.1%}" for name, value in summary.get("held_out", {}).items())
    if loss is not None and summary.get("label_entropy") is not None:
        click.echo(
            f"held-out loss {loss:.3f} nats{measured}; by the labels' frequencies {summary['label_entropy']:.3f}"
        )
    elif loss is not None and measured:
        click.echo(f"held-out loss {loss:.3f} nats{measured}")
    if loss is not None and "loss_in" in summary:
        click.echo(f"held-out loss {loss:.3f}, {summary['loss_in']}")
    if advice := _batch_advice(Path(summary["folder"])):
        click.echo(advice)
    click.echo(f"run folder {summary['folder']}")


def _batch_advice(folder: Path) -> str | None:
    """Where larger batches stop paying, if the run measured that."""
    from thrifty.reporting.key_figures import batch_advice, key_figures
    from thrifty.reporting.run_record import read_run

    if "measure.noise_scale" not in (folder / "recipe.toml").read_text(encoding="utf-8"):
        return None  # the records of a long run take a while to read
    return batch_advice(key_figures(read_run(folder)))
