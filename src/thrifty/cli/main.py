"""`thrifty VERB …`: a verb is imported only when it runs, so that help appears fast."""

import importlib
import logging
import os
import signal
import sys
import time
import warnings
from types import FrameType
from typing import Any

import click

from thrifty.cli.verb_list import TASKS, VERBS
from thrifty.core.atomic_files import NO_ROOM
from thrifty.core.child_python import SAFE
from thrifty.core.errors import STARTED, TYPED, ThriftyError, UsageError, did_you_mean

# OpenMP threads that wait spin for some microseconds, then sleep. If they spin on (the OpenMP default), steps are up to
# 10 times slower when other processes use the cores. If they sleep at once, many small matmuls are up to 3 times slower
# on an idle machine (benchmarks/bench_waiting.py). torch reads these variables when it is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


SILENT = {
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables that silence libraries."""


class VerbGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            raise UsageError(f"there is no verb {cmd_name!r}", did_you_mean(cmd_name, VERBS, "thrifty --help"))
        command: click.Command = importlib.import_module(f"thrifty.cli.{cmd_name}").command
        command.epilog = f"Example: {VERBS[cmd_name].example}"
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            from thrifty.cli.option_errors import usage_error

            raise usage_error(error) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for task, verbs in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(verb, help.about) for verb, help in verbs.items()])
                example = next(iter(verbs.values())).example
                formatter.write(f"\n{'':{formatter.current_indent}}$ {example}\n")


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="thrifty")
def thrifty() -> None:
    """Train Transformers with less compute, memory and data, and prove it."""


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line.

    Exit codes: 0 success, 1 failed run, 2 usage error, 3 infeasible, 4 integrity error, 130 and 143 signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    os.environ[TYPED], os.environ[STARTED] = "1", str(time.monotonic())
    os.environ[SAFE] = "1"  # inherited by every process that torch starts
    if "--quiet" in (sys.argv[1:] if arguments is None else arguments):
        _silence_libraries()
    try:
        return _run_verb(arguments)
    except ThriftyError as error:
        for number in (signal.SIGINT, signal.SIGTERM):  # signals no longer change the exit code
            signal.signal(number, signal.SIG_IGN)
        if not error.is_reported and _is_first_to_report():
            click.echo(f"thrifty: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:  # not the user's path
            raise
        fix = "free some space there" if error.errno in NO_ROOM else "check the path and its permissions"
        usage = UsageError(f"{error.filename or 'standard output'}: {error.strerror}", fix)
        click.echo(f"thrifty: {usage}", err=True)
        sys.exit(usage.exit_code)


def _silence_libraries() -> None:
    """Silence warnings, logs and progress bars of libraries, in this process and in the processes it starts."""
    os.environ |= SILENT
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _run_verb(arguments: list[str] | None) -> Any:
    """Run a verb. Convert an out-of-memory error to an error that names the phase."""
    try:
        return thrifty(arguments, prog_name="thrifty")
    except (MemoryError, RuntimeError, OSError) as error:
        from thrifty.core.out_of_memory import explain_out_of_memory  # imports torch

        with explain_out_of_memory():
            raise error


def _is_first_to_report() -> bool:
    if "RANK" not in os.environ:
        return True
    from thrifty.interface.run_endings import is_first_to_report

    return is_first_to_report()


def _leave(number: int, frame: FrameType | None) -> None:
    """Print the signal, run cleanup code, and exit with the signal's code. A second signal exits immediately. A
    training run handles signals itself.
    """
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_DFL)
    is_stopped_by_launcher = number == signal.SIGTERM and "RANK" in os.environ  # which reports the first failed rank
    if not is_stopped_by_launcher and os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"thrifty: stopped by signal {number}\n".encode())  # print() is unsafe in a signal handler
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
