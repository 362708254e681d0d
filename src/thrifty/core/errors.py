"""Errors a user can act on: what happened, where, and the smallest fix. Each kind has a stable exit code."""

import difflib
import os
import re
from collections.abc import Collection, Iterable


class ThriftyError(Exception):
    """A run failed for a reason that is ours to explain."""

    exit_code = 1
    told = False
    """Whether the user has been told, by this process or by another of the same run."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(f"{what}\n  fix: {for_reader(fix)}" if fix else what)
        self.what, self.fix = what, fix


class UsageError(ThriftyError):
    """A recipe, an option or an input file is not what it must be."""

    exit_code = 2


class InfeasibleError(ThriftyError):
    """What was asked for cannot fit the budget or the machine."""

    exit_code = 3


class IntegrityError(ThriftyError):
    """Stored data is damaged, or a promise made by a technique no longer holds."""

    exit_code = 4


class RefusedError(UsageError):
    """A technique cannot do its work here, and says why."""


class NeedsTrainer(RefusedError):
    """A technique changes what only the trainer has: data, gradients over several passes, or the model's structure."""


def reason_of(error: Exception) -> str:
    """Return an error in one line: what ours say, and the kind and first line of any other."""
    if isinstance(error, ThriftyError):
        return error.what
    return ": ".join(filter(None, (type(error).__name__, str(error).strip().partition("\n")[0])))


def refuse_unknown(complaint: str, word: object, known: Collection[str]) -> None:
    """Raise UsageError for a word that is not known: the complaint, the word, and what may be meant."""
    if word not in known:
        raise UsageError(f"{complaint} {word!r}", fix=did_you_mean(str(word), known))


TYPED = "THRIFTY_TYPED"
"""Environment variable of the processes of a command, in which messages are in its words."""


def spelled(command: str, python: str) -> str:
    """Return a fix for the reader of a message: who typed a command, or who called a function."""
    return command if TYPED in os.environ else python


WORDS_BETWEEN = "and|another|are|for|in|is|looks|of|or|that|to|with"
"""Words of a text that are no value of the option before them."""
OPTION = re.compile(
    rf"(?<![\w-])--(?:(no-[a-z-]+)|([a-z][a-z-]*)(?:[ =](?!\"|(?:{WORDS_BETWEEN})\b)(\S*[^\s,;:.()]))?)"
)
"""An option of the command line with its value: one that switches something off, or the name and the value."""


def for_reader(text: str) -> str:
    """Return a text whose options are arguments where the reader called a function: `--set data.batch=16` is
    `settings={"data.batch": 16}` there. A text with a whole command stays as it is."""
    is_command = "thrifty " in text or "torchrun " in text
    return text if TYPED in os.environ or is_command else OPTION.sub(_argument, text)


def _argument(option: re.Match[str]) -> str:
    off, name, value = option.groups("")
    if off:
        return f"{off.removeprefix('no-').replace('-', '_')}=False"
    if name == "with":
        return f'techniques=[…, "{value}"]' if value else "techniques=[…]"
    if name == "without":
        return f'techniques without "{value}"'
    if name == "set":
        path, _, value = value.partition("=")
        return f'settings={{"{path}": {_literal(value)}}}'
    return f"{name.replace('-', '_')}={_literal(value)}"


def _literal(value: str) -> str:
    """Return a value of the command line as Python has it; one in capitals, such as FILE, stands for another."""
    value = value.strip('"')
    if not value or (value.isalpha() and value.isupper()):
        return '"…"' if value else "…"
    if value in ("true", "false"):
        return value.capitalize()
    return value if re.fullmatch(r"[-\d.]+(e[-+]?\d+)?", value) else f'"{value}"'


def did_you_mean(word: str, options: Iterable[str], otherwise: str = "") -> str:
    """A hint naming the nearest option; when none is near, `otherwise`, or all of them."""
    options = sorted(options)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if otherwise:
        return otherwise
    return f"choose one of: {', '.join(options)}" if options else "there is nothing to choose from"
