"""Markdown (MyST) of generated pages: escaped text, tables, code blocks, links, docstrings."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence


def md(text: object, cell: bool = False) -> str:
    """Return plain text with code in backticks as Markdown; `cell` for a cell of a table."""
    parts = re.split(r"(`[^`]+`)", " ".join(str(text).split()) if cell else str(text))
    escaped = [part if part[:1] == "`" else re.sub(r"([\\*_<>\[\]#|$~])", r"\\\1", part) for part in parts]
    return "".join(part.replace("|", "\\|") if cell and part[:1] == "`" else part for part in escaped)


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a table; cells that are already Markdown are passed as `Markdown`."""
    rule = [Markdown("---")] * len(head)
    lines = [[each if isinstance(each, Markdown) else md(each, True) for each in line] for line in (head, rule, *body)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Markdown(str):
    """Text that is Markdown and is not escaped again."""


def code(text: object) -> Markdown:
    return Markdown(f"`{str(text).replace('|', chr(92) + '|')}`")


def block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def technique_link(technique: str) -> Markdown:
    return Markdown(f"[](#{technique})")


def toctree(names: Iterable[str], **options: str) -> str:
    lines = [f":{key}: {value}".rstrip() for key, value in {"hidden": "", **options}.items()]
    return block("{toctree}", "\n".join([*lines, "", *names]))


def join(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def docstring(text: str | None) -> str:
    """Return a docstring as Markdown: paragraphs, arguments as a list, the example as code."""
    parts = []
    for part in re.split(r"\n\n(?=\S)", inspect.cleandoc(text or "")):
        head, _, rest = part.partition("\n")
        if head.rstrip() in ("Args:", "Attributes:"):
            found = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            named = (re.match(r"(\*{0,2}\w+): (.*)", each, re.DOTALL) for each in found)
            parts.append("\n".join(f"- `{one[1]}`: {md(' '.join(one[2].split()))}" for one in named if one))
        elif part.startswith("Example::"):
            example = textwrap.dedent(part.partition("::")[2]).strip("\n")
            parts += ["Example:", block("python", example.replace("…", "..."))]
        else:
            parts.append(md(" ".join(part.split())))
    return join(*parts)
