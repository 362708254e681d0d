"""Redaction of secrets in all texts that Thrifty writes for people. It recognizes key names and known formats of
values.

The files are meant to be shared, so a false alarm costs less than a leak. Formats of random letters and digits must be
long or have a mark that words lack. Otherwise a name such as `hf_llama_small` would count as a key.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

SECRET_WORDS = {"token", "secret", "secrets", "password", "passwords", "passwd", "passphrase", "pwd", "apikey"}
SECRET_WORDS |= {"cookie", "cookies", "credential", "credentials", "authorization", "bearer"}
_KEY_KINDS = ("api", "access", "private", "secret", "auth", "account", "encryption", "signing", "storage", "wandb")
SECRET_PAIRS = {(kind, key) for kind in _KEY_KINDS for key in ("key", "keys")}
SECRET_PAIRS |= {("db", "pass"), ("user", "pass"), ("smtp", "pass"), ("access", "signature"), ("amz", "signature")}

_SHAPES = re.compile(
    r"""
    -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY(?:[ ]BLOCK)?-----|.*)
    | AGE-SECRET-KEY-1[0-9A-Z]{20,}
    # model hubs and providers of models
    | \b(?:hf|gsk|r8|fw|api_org)_[A-Za-z0-9]{16,}
    | \b(?:sk|pk|rk)-(?:proj|svcacct|admin|ant|or|lf)-[\w-]{8,}
    | \b(?:c?sk|pk|rk)-(?:[a-z0-9]{1,12}-){0,3}[A-Za-z0-9]{16,}
    | \b(?:nvapi|xai|pplx|tvly|pypi|PMAK|NRAK|GOCSPX)-[\w-]{16,}
    | \b(?:pcsk|tgp_v1|wandb_v1|lsv2_[ps][tk])_\w{20,}
    | \b(?:KGAT|ntn|rnd|sbp|pul|secret)_[A-Za-z0-9]{20,}
    # code, packages, clouds
    | \b(?:gh[pousr]|npm|rubygems)_[A-Za-z0-9]{12,}
    | \b(?:github_pat|dckr_pat|lin_api|sntry[su]|gl(?:sa|c)|do[opr]_v1)_[\w=+/-]{8,}
    | \b(?:shp(?:at|ca|pa|ss)|pscale_(?:tkn|pw|oauth))_[\w.-]{16,}
    | \bgl(?:pat|dt|rt|cbt|ptt|soat|ft|imt|agent|oas|ffct)-[\w.-]{8,}
    | \b(?:AKIA|ASIA|ABIA|ACCA|AROA|AIDA)[A-Z0-9]{12,}
    | \bABSK[A-Za-z0-9+/=]{40,}
    | \bAIza[\w-]{20,}
    | \b(?:ya29|SG|hv[bsr])\.[\w.-]{10,}
    | \bdp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{16,}
    | \b[A-Za-z0-9]{14}\.atlasv1\.[\w-]{20,}
    | (?<![\w.~-])[\w.~]{3}\dQ~[\w.~-]{30,}
    | \bdapi[0-9a-f]{32}
    # messages and payments
    | \b(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}
    | (?<=hooks\.slack\.com/)(?:services|workflows)/[\w/+-]{8,}
    | (?<=/api/webhooks/)\d+/[\w-]{8,}
    | \b[MNO][A-Za-z0-9_-]{23,27}\.[\w-]{6}\.[\w-]{27,}
    | \b\d{8,10}:AA[\w-]{30,}
    | \b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{8,}
    | \bwhsec_[A-Za-z0-9+/=]{16,}
    | \b(?:SK|AC)[0-9a-f]{32}\b
    | \bkey-[0-9a-f]{32}\b
    | \b[0-9a-f]{32}-us\d{1,2}\b
    # JSON in base64: web tokens, keys of trackers
    | \beyJ[\w-]{8,}(?:\.[\w-]+){1,4}
    | \beyJ[A-Za-z0-9+/_-]{24,}={0,2}
    """,
    re.VERBOSE | re.DOTALL,
)
_URL_PASSWORD = re.compile(r"""(?<=://)([^\s/:@]{0,200}):(?!\d{1,5}/)(?:[^\s"'<>/]{1,200}|[^\s"'<>]{1,200}?)@""")
_URL_KEY = re.compile(r"(?<=://)[^\s/:@]{16,200}(?=@)")
_URL_SIGNATURE = re.compile(r"""([?&;](?:sig|key)=)[^\s&"'<>;]{16,}""", re.IGNORECASE)
_HEADER = re.compile(r"\b((?:proxy-)?authorization|(?:set-)?cookie)(\s*:\s*)(?=\S)[^\n\"']+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_NETRC = re.compile(r"(\blogin\s+\S+\s+password\s+)\S+")
_OPTION = re.compile(r"(?<![\w-])(--[A-Za-z][\w-]{1,60}\s+)(?!-)[^\s\"']+")
_KEY = re.compile(r"""([A-Za-z_][\w.-]{0,120})["']?\s{0,3}[=:]\s{0,3}""")
_VALUE = re.compile(r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[^\s,;&"']+""")
_ARGUMENT = re.compile(r"(-*[A-Za-z_][\w.-]*)=(.+)", re.DOTALL)
_PICTURE = re.compile(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]*")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[+-]?[\d_.]+(e[+-]?\d+)?", re.IGNORECASE)


def names_a_secret(key: str) -> bool:
    """Return True if a key's words mark its value as secret: `HF_TOKEN`, `apiKey`, but not `tokens`, `tokenizer`."""
    words = [word.lower() for word in _WORDS.findall(key)]
    return not SECRET_WORDS.isdisjoint(words) or not SECRET_PAIRS.isdisjoint(pairwise(words))


def redact_text(text: str) -> str:
    """Return the text with keys, passwords in URLs and values of `secret_name=value` replaced by `[redacted]`."""
    text = _SHAPES.sub(REDACTED, text)
    text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
    text = _URL_KEY.sub(REDACTED, text)
    text = _URL_SIGNATURE.sub(rf"\1{REDACTED}", text)
    text = _HEADER.sub(rf"\1\2{REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _NETRC.sub(rf"\1{REDACTED}", text)
    text = _OPTION.sub(lambda match: f"{match[1]}{REDACTED}" if names_a_secret(match[1]) else match[0], text)
    return _redact_assignments(text)


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without secrets. A word after an option such as `--password` is also redacted."""
    shown, secret_follows = [], False
    for argument in map(str, arguments):
        assigned = _ARGUMENT.fullmatch(argument)
        if secret_follows:
            shown.append(REDACTED)
        elif assigned and names_a_secret(assigned[1]) and not _is_count(*assigned.groups()):
            shown.append(f"{assigned[1]}={REDACTED}")  # the whole argument, with commas and spaces
        else:
            shown.append(redact_text(argument))
        secret_follows = argument.startswith("-") and "=" not in argument and names_a_secret(argument)
    return shown


def redact(value: Any, key: str = "", keep: Callable[[str], bool] = lambda text: False) -> Any:
    """Return a JSON value without secrets. Numbers stay, because a measured `bytes_per_token` is not a secret. Images,
    and strings for which `keep` returns True, stay too."""
    if isinstance(value, Mapping):
        secret = key if names_a_secret(key) else ""
        return {redact_text(str(name)): redact(inner, secret or str(name), keep) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return redact_command(value) if key == "command" else [redact(inner, key, keep) for inner in value]
    if isinstance(value, str) and not _PICTURE.fullmatch(value):
        shown = REDACTED if value and names_a_secret(key) else redact_text(value)
        return shown if shown == value or not keep(value) else value
    return value


def _is_count(key: str, value: str) -> bool:
    return "token" in key.lower() and _NUMBER.fullmatch(value) is not None


def _redact_assignments(text: str) -> str:
    shown, end = [], 0
    for key in _KEY.finditer(text):  # as in `name:key=value`, a value may begin with another assignment
        value = _VALUE.match(text, key.end()) if key.start() >= end and names_a_secret(key[1]) else None
        if value and not _is_count(key[1], value[0]):
            quote = value[0][0] if value[0][0] in "\"'" else ""
            shown.append(f"{text[end : key.end()]}{quote}{REDACTED}{quote}")
            end = value.end()
    return "".join(shown) + text[end:]
