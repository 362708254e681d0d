"""Results of public functions: tables in a terminal, HTML in a notebook, and plain data in a script."""

import io
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

WIDTH = 160
"""Line width in characters if there is no terminal. Tables fit this width."""
HTML = '<pre style="white-space: pre; overflow-x: auto">{code}</pre>'


class PrintedResult:
    """Result that prints as text and tables, and converts to plain data."""

    exit_code = 0
    """Exit code of the command that returns this result."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError

    def as_dict(self) -> Any:
        """Return the content as plain, JSON-compatible data."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self._console().export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        return self._console().export_html(inline_styles=True, code_format=HTML)

    def _console(self) -> Console:
        # a notebook displays the returned text; by default rich would display it too
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, record=True, force_jupyter=False)
        console.print(self, soft_wrap=True)
        return console

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class ResultTable(PrintedResult):
    """Table of texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def as_dict(self) -> list[dict[str, str]]:
        return [dict(zip(self.head, row, strict=True)) for row in self.rows]

    def __rich__(self) -> RenderableType:
        table = open_table()
        for column in self.head:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


def open_table(*columns: str, show_header: bool = True) -> Table:
    """Return an empty table without cell borders. Cells wrap to the terminal."""
    return Table(*columns, box=None, pad_edge=False, show_header=show_header)


def number_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table. The first column is left-aligned; all other columns are right-aligned."""
    table = open_table()
    for index, column in enumerate(head):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def lines(*parts: RenderableType) -> Group:
    """Stack texts and tables vertically. Texts are printed without markup and control characters."""
    return Group(*(Text(visible(part)) if isinstance(part, str) else part for part in parts))


def visible(text: str) -> str:
    """Return a text with control characters replaced. A model may generate them, and they would change the terminal."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def print_to_terminal(result: PrintedResult) -> None:
    """Print a result in the colors and width of the terminal. Without a terminal, the width of tables is `WIDTH`, and
    lines of text do not wrap."""
    is_terminal = sys.stdout.isatty()
    Console(highlight=False, width=None if is_terminal else WIDTH).print(result, soft_wrap=not is_terminal)
