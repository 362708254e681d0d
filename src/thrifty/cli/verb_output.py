"""Printing of verb results."""

import json
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thrifty.interface.training import RunResult
    from thrifty.reporting.printed_result import PrintedResult


def print_result(result: "PrintedResult", as_json: bool, quiet: bool = False) -> None:
    """Print a result as JSON or text on rank 0. Exit with the result's exit code unless the code is 0."""
    from thrifty.reporting.printed_result import print_to_terminal

    if os.environ.get("RANK", "0") != "0":
        pass
    elif as_json:
        click.echo(json.dumps(result.as_dict(), indent=1, ensure_ascii=False, default=str))
    elif not quiet:
        print_to_terminal(result)
    if result.exit_code:
        sys.exit(result.exit_code)


@contextmanager
def loading(quiet: bool) -> "Iterator[None]":
    """Show inside the block, on a terminal, that PyTorch is loading, which takes seconds."""
    is_shown = sys.stderr.isatty() and not quiet
    if is_shown:
        click.echo("loading PyTorch …", err=True, nl=False)
    try:
        yield
    finally:
        if is_shown:
            click.echo(f"\r{'':17}\r", err=True, nl=False)


def finished_run(start: "Callable[[], RunResult]") -> "RunResult":
    """Call `start` and return its run, even if a signal stopped the run."""
    from thrifty.interface.training import RunInterrupted, RunTerminated

    try:
        return start()
    except (RunInterrupted, RunTerminated) as stopped:
        return stopped.run
