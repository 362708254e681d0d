"""`thrifty VERB …`: verbs are imported only when used, so that help answers at once."""

import importlib
import os
import pkgutil
import signal
import sys
from types import FrameType
from typing import Any

import click

from thrifty.cli import __path__ as _folder
from thrifty.core.atomic_files import NO_ROOM
from thrifty.core.child_python import SAFE
from thrifty.core.errors import TYPED, ThriftyError, UsageError, did_you_mean

# A thread that waits for its fellows looks for them some microseconds and then sleeps. Spinning, as OpenMP does by
# default, makes a step up to ten times slower as soon as anything else wants the processor; sleeping at once makes many
# small products up to three times slower on a quiet machine (benchmarks/bench_waiting.py). Read as torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

ABOUT = {
    "check": "Does a recipe still compute what it promises? Seconds, before it runs.",
    "compare": "Race techniques or recipes against a baseline at equal budget: a verdict.",
    "train": "Train by a recipe: a name or a TOML file, with any setting changed.",
    "resume": "Go on with a run that ended early, exactly where it was.",
    "study": "A published experiment in small: many runs, a table, what was expected.",
    "lottery": "Lottery tickets: train, prune, rewind, again; it can be resumed.",
    "list": "What there is: techniques, recipes, presets, data.",
    "show": "The card of one technique: what, promise, cost, when not, settings.",
    "trace": "What attention computes, recorded into a file for simulated accelerators.",
    "plan": "Which techniques to switch on under a budget, and why not the rest; sizes: size, fit.",
    "simulate": "What is not here: a step on a cluster, attention on an accelerator.",
    "estimate": "Will a training step fit, what its memory is made of, and what would make it fit.",
    "explain": "What a recipe will do, stage by stage, before it runs.",
    "report": "A run folder as one offline HTML page.",
    "board": "Runs, live curves, studies and technique cards in the browser.",
    "track": "What a run recorded, for TensorBoard, MLflow, Weights & Biases or Trackio.",
    "export": "A trained model as a Hugging Face folder.",
    "sample": "Text from a trained model.",
    "chat": "Talk to a trained model.",
    "retrieve": "How well images and captions find each other.",
    "data": "Data sets: list, get, look; score and prune examples.",
    "doctor": "What this machine can do, and what is missing.",
}
"""The short help of each verb stands here so that it can be listed without importing the verb."""


class VerbGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verb in ABOUT if verb in _verbs()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _verbs():
            ctx.fail(f"there is no verb {cmd_name!r}: {did_you_mean(cmd_name, _verbs())}")
        return importlib.import_module(f"thrifty.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, ABOUT[verb]) for verb in self.list_commands(ctx)])


def _verbs() -> set[str]:
    return {module.name for module in pkgutil.iter_modules(_folder) if module.name in ABOUT}


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="thrifty")
def thrifty() -> None:
    """Train Transformers with less compute, memory and data, and prove it."""


def main(arguments: list[str] | None = None) -> Any:
    """Runs a verb. Exit codes: 0 fine, 1 a run failed, 2 usage, 3 infeasible, 4 integrity, 130 and 143 signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    os.environ[TYPED] = "1"
    os.environ[SAFE] = "1"  # for all that torch may start, too
    try:
        return _explained(arguments)
    except ThriftyError as error:
        for number in (signal.SIGINT, signal.SIGTERM):  # the end is decided, and so is its exit code
            signal.signal(number, signal.SIG_IGN)
        if not error.told and _is_first_to_tell():
            click.echo(f"thrifty: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:  # nothing that the user named
            raise
        fix = "free some space there" if error.errno in NO_ROOM else "check the path and its permissions"
        told = UsageError(f"{error.filename or 'standard output'}: {error.strerror}", fix)
        click.echo(f"thrifty: {told}", err=True)
        sys.exit(told.exit_code)


def _explained(arguments: list[str] | None) -> Any:
    """Run a verb; the lack of memory is an error that names the phase."""
    try:
        return thrifty(arguments, prog_name="thrifty")
    except (MemoryError, RuntimeError, OSError) as error:
        from thrifty.core.out_of_memory import explain_out_of_memory  # imports torch

        with explain_out_of_memory():
            raise error


def _is_first_to_tell() -> bool:
    if "RANK" not in os.environ:
        return True
    from thrifty.interface.run_endings import is_first_to_report

    return is_first_to_report()


def _leave(number: int, frame: FrameType | None) -> None:
    """Say so, unwind and exit with the usual code, at once if asked again; while it trains, a run has its own way to
    end."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"thrifty: stopped by signal {number}\n".encode())  # a print may have been interrupted
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
