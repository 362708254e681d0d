"""Checks for names of folders and exported files, and escaping of text for comments in them."""

from collections.abc import Iterable

from thrifty.core.errors import UsageError
from thrifty.core.secret_redaction import redact_text

_LONGEST = 200
_ALLOWED = frozenset(" -_.+=,@%()[]:")


def check_name(name: str, subject: str = "name") -> str:
    """Return the name if it is safe as a folder, in a shell command and in source code. Raises UsageError unless it has
    at most 200 letters, digits and characters of ` -_.+=,@%()[]:`. It must begin with a letter, a digit or "_", and not
    end with a space. Names that look like an API key are refused."""
    if redact_text(name) != name:
        raise UsageError(
            f"{subject} looks like a key or a password, and names are shown", fix="use letters, digits and -"
        )
    safe = all(character.isalnum() or character in _ALLOWED for character in name)
    if safe and name and len(name) <= _LONGEST and (name[0].isalnum() or name[0] == "_") and name[-1] != " ":
        return name
    limit = f"a name begins with a letter or digit and has at most {_LONGEST} letters, digits and - _ ."
    raise UsageError(f"{subject} is {name[:_LONGEST]!r}: {limit}", fix="use letters, digits and -")


def comment_lines(texts: Iterable[str]) -> str:
    """Return each text as one comment line of Python, YAML or TOML, with spaces for unprintable characters."""
    lines = ("".join(character if character.isprintable() else " " for character in text) for text in texts)
    return "".join(f"# {line}\n" for line in lines)
