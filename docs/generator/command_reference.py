"""Reference of the command line and of its exit codes."""

import inspect
from collections.abc import Iterator

import click

from generator.markdown import block, code, join, md, table
from thrifty.cli.main import thrifty as command_line
from thrifty.cli.verb_list import TASKS
from thrifty.core import errors


def commands() -> str:
    """Return the reference of the command line, by task."""
    parts = [
        "# Command line",
        "`thrifty VERB --help` prints the same texts. Most commands that print a result accept `--json`.",
    ]
    for task, verbs in TASKS.items():
        parts.append(f"## {task}")
        for verb, about in verbs.items():
            command = command_line.get_command(click.Context(command_line), verb)
            assert command is not None
            parts += [*_command(command, f"thrifty {verb}", 3), "Example:", block("bash", about.example)]
    return join(*parts)


def _command(command: click.Command, path: str, level: int) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"{'#' * level} {path}"
    yield block("text", command.get_usage(context).removeprefix("Usage: "))
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    yield join(*(block("text", part[2:]) if part[:1] == "\b" else md(" ".join(part.split())) for part in parts))
    records = [each.get_help_record(context) for each in command.params if isinstance(each, click.Option)]
    options = [(code(record[0]), record[1]) for record in records if record]
    if options:
        yield table(("option", "effect"), options)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(below, f"{path} {name}", level + 1)


def exit_codes() -> str:
    """Return the exit codes of commands."""
    kinds = (errors.UsageError, errors.InfeasibleError, errors.IntegrityError)
    body = [
        (code(0), "Success."),
        (code(1), "A run failed, a promise is broken, or a saved result is not reproduced."),
        *((code(kind.exit_code), (kind.__doc__ or "").partition("\n")[0]) for kind in kinds),
        (code(130), "Stopped by Ctrl-C (SIGINT). A training run saves a checkpoint first."),
        (code(143), "Stopped by SIGTERM. A training run saves a checkpoint first."),
    ]
    return join(
        "# Exit codes",
        table(("code", "meaning"), body),
        "In Python, the codes 2, 3 and 4 are the exceptions `UsageError`, `InfeasibleError` and `IntegrityError`. All "
        "are a `thrifty.ThriftyError`, with the message in `what` and the fix in `fix`.",
    )
