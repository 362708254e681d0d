"""Errors of the command line in the form of all errors: what failed, and a fix."""

import re

import click

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.peer_names import PEER_OPTIONS, peer_option

_EXAMPLES = {option.partition(" ")[0]: option for option in reversed(PEER_OPTIONS)}
"""An example of each option with its value."""


def usage_error(error: click.UsageError) -> UsageError:
    """Return click's error for wrong words as a UsageError, whose fix is an option with a value, or the verb's help."""
    message = error.format_message().rstrip(".")
    usual = f"{error.ctx.command_path if error.ctx else 'thrifty'} --help"
    if isinstance(error, click.NoSuchOption):
        parameters = error.ctx.command.params if error.ctx else ()
        word = error.option_name.lstrip("-")
        if any(isinstance(each, click.Argument) and each.name == word for each in parameters):
            fix = f"pass the {word} without an option: {usual.removesuffix('--help')}{word.upper()}"
            return UsageError(f"No such option '{error.option_name}'", fix)
        known = [option for each in (error.ctx.command.params if error.ctx else ()) for option in each.opts]
        option = peer_option(error.option_name)
        near = option if option.partition(" ")[0] in known else next(iter(error.possibilities or ()), "")
        return UsageError(f"No such option '{error.option_name}'", near or usual)
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", "") or (parameter.opts[-1] if parameter else "")
    fix = _EXAMPLES.get(option, usual)
    if wrong := re.fullmatch(r"Invalid value for .+?: '?([^']*)'? is not (in the range|a valid|one of) (.*)", message):
        value, form, limit = wrong.groups()
        if isinstance(parameter and parameter.type, click.Choice):
            return UsageError(f"{option} {value!r} is not known", did_you_mean(value, parameter.type.choices))
        limit = f"in the range {limit}" if form == "in the range" else f"a {limit.removesuffix(' range')}"
        message = f"{option} {value!r} is not {limit}"
    return UsageError(message, fix)
