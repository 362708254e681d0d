"""Commands of `thrifty` parsed as they are typed, without running them."""

from collections.abc import Sequence

from click import Command, Group

from thrifty.cli.main import thrifty


def parse(words: Sequence[str], command: Command = thrifty) -> None:
    """Raise click's UsageError for words that the command, or a verb below it, does not take."""
    context = command.make_context(command.name, [*words])
    if isinstance(command, Group):
        _, verb, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert verb is not None
        parse(rest, verb)
