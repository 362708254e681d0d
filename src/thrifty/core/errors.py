"""Errors with a message, a fix, and a stable exit code per error type."""

import difflib
import os
import re
from collections.abc import Collection, Iterable


class ThriftyError(Exception):
    """Base class of Thrifty's errors, with a message and a fix."""

    exit_code = 1
    is_reported = False
    """True if a process of the same run has already printed the error."""

    def __init__(self, what: str, fix: str = ""):
        if TYPED not in os.environ:
            what = re.sub(r"^--([a-z]+)(?= ')", r"\1", what)
        super().__init__(f"{what}\n  fix: {for_reader(fix)}" if fix else what)
        self.what, self.fix = what, fix


class UsageError(ThriftyError):
    """Error in a recipe, an option or an input file."""

    exit_code = 2


class InfeasibleError(ThriftyError):
    """Error for a request that does not fit the budget or the machine."""

    exit_code = 3


class IntegrityError(ThriftyError):
    """Error for damaged stored data, or for a technique's promise that no longer holds."""

    exit_code = 4


class RefusedError(UsageError):
    """Refusal to run with this model, data or machine. The message has the reason."""


class NeedsTrainer(RefusedError):
    """Refusal outside the trainer: the technique changes data, model structure, or gradients over several passes."""


def reason_of(error: Exception) -> str:
    """Return an error as one line: the message of a ThriftyError, or the type and first line of any other error."""
    if isinstance(error, ThriftyError):
        return error.what
    return ": ".join(filter(None, (type(error).__name__, str(error).strip().partition("\n")[0])))


def class_name(model: object) -> str:
    """Return the name of a model's class. If the class is a wrapper, return the name of the class inside, which is in
    the attribute that the wrapper names in `wraps_model_in`."""
    return type(getattr(model, getattr(type(model), "wraps_model_in", ""), model)).__name__


def refuse_unknown(complaint: str, word: object, known: Collection[str]) -> None:
    """Raise UsageError with the complaint and the word if `word` is not in `known`. The fix names the nearest known
    word."""
    if word not in known:
        raise UsageError(f"{complaint} {word!r}", fix=did_you_mean(str(word), known))


STARTED = "THRIFTY_STARTED"
"""Environment variable with the start of a command, in seconds of time.monotonic()."""
TYPED = "THRIFTY_TYPED"
"""Environment variable of command-line processes. If it is set, fixes name command-line options."""


def spelled(command: str, python: str) -> str:
    """Return the fix for the reader: `command` on the command line, otherwise the Python call."""
    return command if TYPED in os.environ else python


WORDS_BETWEEN = "and|another|are|for|in|is|looks|of|or|that|to|with"
"""Words after an option that continue the sentence and are not the option's value."""
OPTION = re.compile(
    rf"(?<![\w-])--(?:(no-[a-z-]+)|([a-z][a-z-]*)(?:[ =](?!\"|(?:{WORDS_BETWEEN})\b)(\S*[^\s,;:.()]))?)"
)
"""Pattern of a command-line option and its value: a `--no-…` switch, or the name and the value."""


def for_reader(text: str) -> str:
    """Return a text with options rewritten as Python arguments if the reader called a Python function. `--set
    data.batch=16` becomes `settings={"data.batch": 16}`. Texts with a whole command stay unchanged."""
    is_command = "thrifty " in text or "torchrun " in text
    if TYPED in os.environ or is_command:
        return text
    return OPTION.sub(_argument, text).replace("} settings={", ", ")  # one argument for neighboring settings


SHORT = {
    "lr": "techniques=[thrifty.AdamW(lr={})]",
    "epochs": 'budget="{} epochs"',
    "patience": 'settings={{"evaluation.patience": {}}}',
}
"""Python argument of each short option that has no argument of the same name."""


def _argument(option: re.Match[str]) -> str:
    off, name, value = option.groups("")
    if off:
        return f"{off.removeprefix('no-').replace('-', '_')}=False"
    if name == "with":
        return f'techniques=[…, "{value}"]' if value else "techniques=[…]"
    if name == "without":
        return f'techniques without "{value}"'
    if name in SHORT:
        return SHORT[name].format(_literal(value))
    if name == "over":
        path, _, value = value.partition("=")
        return f'over={{"{path}": "{value}"}}'
    if name == "set":
        path, _, value = value.partition("=")
        return f'settings={{"{path}": {_literal(value)}}}'
    return f"{name.replace('-', '_')}={_literal(value)}"


def _literal(value: str) -> str:
    """Return a command-line value as a Python literal. A placeholder in capitals, such as FILE, becomes "…"."""
    value = value.strip('"')
    if not value or (value.isalpha() and value.isupper()):
        return '"…"' if value else "…"
    if value in ("true", "false"):
        return value.capitalize()
    return value if re.fullmatch(r"[-\d.]+(e[-+]?\d+)?", value) else f'"{value}"'


def did_you_mean(word: str, options: Iterable[str], otherwise: str = "") -> str:
    """Return a hint with the nearest option. If no option is near, return `otherwise`, or a list of all options."""
    options = sorted(options)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if otherwise:
        return otherwise
    return f"choose one of: {', '.join(options)}" if options else "there is nothing to choose from"
