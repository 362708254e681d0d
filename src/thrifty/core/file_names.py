"""Checks for names of folders and exported files, and escaping of comments in exported files."""

from collections.abc import Iterable

from thrifty.core.errors import UsageError
from thrifty.core.secret_redaction import redact_text

_LONGEST = 200
_ALLOWED = frozenset(" -_.+=,@%()[]:")


def check_name(name: str, subject: str = "name") -> str:
    """Return the name if it is safe as a folder name, in a shell command and in source code; otherwise raise
    UsageError. A safe name has at most 200 letters, digits and characters of ` -_.+=,@%()[]:`. It begins with a letter,
    a digit or "_", and does not end with a space. A name that looks like an API key is refused."""
    if redact_text(name) != name:
        raise UsageError(
            f"{subject} looks like a key or a password, and names appear in reports",
            fix="choose another name, such as baseline-1",
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
