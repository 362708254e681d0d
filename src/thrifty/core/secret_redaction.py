"""Redaction of secrets in reports and in what run folders record: by the names of keys and by known shapes of values.

A report is made to be shared, so a false alarm is cheaper than a leak.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

SECRET_WORDS = {"token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "apikey", "cookie"}
SECRET_WORDS |= {"credential", "credentials", "authorization", "bearer"}
SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")}

_SHAPES = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|.*)
    | \b(?:hf|ghp|gho|ghu|ghs|ghr|npm|glpat|github_pat|dop_v1|r8|nvapi|gsk)[_-][A-Za-z0-9_-]{8,}
    | \b(?:sk|pk|rk)-[A-Za-z0-9_-]{8,}
    | \b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{8,}
    | \b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}
    | \bAIza[A-Za-z0-9_-]{20,}
    | \bya29\.[A-Za-z0-9_-]{10,}
    | \bxox[a-z]-[A-Za-z0-9-]{8,}
    | \bpypi-[A-Za-z0-9_-]{16,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@]{0,200}):([^\s/@]{1,200})@")
_URL_KEY = re.compile(r"(?<=://)[^\s/:@]{16,200}(?=@)")
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"""([A-Za-z_][\w.-]{0,120})(["']?\s{0,3}[=:]\s{0,3})("[^"\n]*"|'[^'\n]*'|[^\s,;&"']+)""")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[+-]?[\d_.]+(e[+-]?\d+)?", re.IGNORECASE)


def names_a_secret(key: str) -> bool:
    """Whether a key's words say that its value is private: `HF_TOKEN` and `apiKey` do, `tokens`, `tokenizer` do not."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return not SECRET_WORDS.isdisjoint(words) or not SECRET_PAIRS.isdisjoint(pairwise(words))


def redact_text(text: str) -> str:
    """`text` with everything that looks like a key, a password in a URL or `secret_name=value` blanked out."""
    text = _SHAPES.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
    text = _URL_KEY.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _ASSIGNMENT.sub(_redact_assignment, text)


def redact_command(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets, including those given as the word after `--password`."""
    shown, secret_follows = [], False
    for argument in map(str, arguments):
        shown.append(REDACTED if secret_follows else redact_text(argument))
        secret_follows = argument.startswith("-") and "=" not in argument and names_a_secret(argument)
    return shown


def redact(value: Any, key: str = "") -> Any:
    """A JSON value without secrets. Numbers stay: a measured `bytes_per_token` is no secret."""
    if isinstance(value, Mapping):
        return {redact_text(str(name)): redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return redact_command(value) if key == "command" else [redact(inner, key) for inner in value]
    if isinstance(value, str):
        return REDACTED if value and names_a_secret(key) else redact_text(value)
    return value


def _redact_assignment(match: re.Match[str]) -> str:
    key, sign, value = match.groups()
    if REDACTED in value or ("token" in key.lower() and _NUMBER.fullmatch(value)):
        return match.group()
    if not names_a_secret(key):  # as in `name:key=value`, the value may be an assignment itself
        return f"{key}{sign}{_ASSIGNMENT.sub(_redact_assignment, value)}"
    quote = value[0] if value[0] in "\"'" else ""
    return f"{key}{sign}{quote}{REDACTED}{quote}"
