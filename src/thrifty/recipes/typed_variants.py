"""Variants of a comparison on the command line: changes of a recipe, with the options of `thrifty train`."""

import os
import shlex
from collections.abc import Callable, Sequence

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.recipe import Recipe

CHANGES = ("--with", "--without", "--set")


def read_variants(texts: Sequence[str], load: Callable[[str], Recipe]) -> dict[str, list[Recipe | str]]:
    """Return the changes of each variant by the variant's name.

    A variant is "NAME: RECIPE --without NAME --with NAME:KEY=VALUE,… --set PATH=VALUE". All parts are optional. The
    default name is the text itself, and the default recipe is the baseline. `load` returns a recipe by name or file.
    Raises UsageError for any other text.
    """
    variants: dict[str, list[Recipe | str]] = {}
    for text in texts:
        name, colon, rest = text.partition(": ")
        label, typed = (name.strip(), rest.strip()) if colon else (text.strip(), text.strip())
        words = [typed] if os.path.isfile(typed) else _words(typed)  # a file's name may have spaces
        if not label or not words:
            raise UsageError(f"variant {text!r} is empty", fix='add a change: --variant "--with growth.stacking"')
        if label in variants:
            raise UsageError(f"two variants are called {label!r}", fix=f"name one of them, such as 'big: {text}'")
        is_recipe = not words[0].startswith(("-", "+")) and "=" not in words[0]
        additions, removals, assignments = _typed_changes(text, words[is_recipe:])
        first = [load(words[0])] if is_recipe else []
        variants[label] = [*first, *(f"-{name}" for name in removals), *additions, *assignments]
    return variants


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"variant {text!r}: {error}", fix="close its quotes") from error


def _typed_changes(text: str, words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of --with, --without and --set among the words of a variant."""
    values: dict[str, list[str]] = {option: [] for option in CHANGES}
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option not in values:
            likely = did_you_mean(option, CHANGES) if word.startswith("--") else _spelled(word)
            raise UsageError(f"variant {text!r}: {word!r} is not one of {', '.join(CHANGES)}", fix=likely)
        value = value if equals else next(remaining, "")
        if not value:
            raise UsageError(f"variant {text!r}: {option} has no value", fix=f"see {option} in thrifty train --help")
        values[option].append(value)
    return values["--with"], values["--without"], values["--set"]


def _spelled(word: str) -> str:
    option = "--without" if word.startswith("-") else "--set" if "=" in word and ":" not in word else "--with"
    return f"{option} {word.lstrip('+-')}"
