"""Printing of results by verbs."""

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from thrifty.reporting.printed_result import PrintedResult


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))


def print_result(result: "PrintedResult", as_json: bool, quiet: bool = False) -> None:
    """Print what a public function returns, as JSON or as text, on rank 0."""
    from thrifty.reporting.printed_result import print_to_terminal

    if os.environ.get("RANK", "0") != "0":
        return
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
