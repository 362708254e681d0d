"""Variants of a comparison as they are typed: changes of a recipe, spelled as for `thrifty train`."""

import os
import shlex
from collections.abc import Callable, Sequence

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.recipe import Recipe

CHANGES = ("--with", "--without", "--set")


def read_variants(texts: Sequence[str], load: Callable[[str], Recipe]) -> dict[str, list[Recipe | str]]:
    """Return the changes of each variant by its name, as they are typed: "NAME: RECIPE --without NAME --with
    NAME:KEY=VALUE,… --set PATH=VALUE", of which everything may be left out.

    Without a name the text is the name; without a recipe the changes are of the baseline. `load` returns a recipe by
    its name or file. Raises UsageError for any other text.
    """
    variants: dict[str, list[Recipe | str]] = {}
    for text in texts:
        name, colon, rest = text.partition(": ")
        label, typed = (name.strip(), rest.strip()) if colon else (text.strip(), text.strip())
        words = [typed] if os.path.isfile(typed) else _words(typed)  # a file's name may have spaces
        if not label or not words:
            raise UsageError(
                f"variant {text!r} is empty", fix='say what it changes: --variant "--with growth.stacking"'
            )
        if label in variants:
            raise UsageError(f"two variants are called {label!r}", fix="give each a name of its own, such as 'big: …'")
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
    """Return the values of --with, --without and --set."""
    values: dict[str, list[str]] = {option: [] for option in CHANGES}
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if option not in values:
            likely = did_you_mean(option, CHANGES) if word.startswith("--") else _spelled(word)
            raise UsageError(f"variant {text!r}: {word!r} is none of {', '.join(CHANGES)}", fix=likely)
        value = value if equals else next(left, "")
        if not value:
            raise UsageError(f"variant {text!r}: {option} has no value", fix=f"thrifty train --help shows {option}")
        values[option].append(value)
    return values["--with"], values["--without"], values["--set"]


def _spelled(word: str) -> str:
    option = "--without" if word.startswith("-") else "--set" if "=" in word and ":" not in word else "--with"
    return f"{option} {word.lstrip('+-')}"
