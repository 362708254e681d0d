"""Python sources of the standard library and of torch, as files and as functions with their docstrings.

The files exist on every machine.
"""

import ast
import hashlib
import importlib.util
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

SIZE = 40_000_000
"""Maximum total size of the source text in bytes."""
SHORTEST_DOCSTRING = 40
"""Minimum number of characters of a docstring."""
LONGEST_FUNCTION = 60
"""Maximum number of lines of a function."""
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_files(size: int = SIZE) -> tuple[Path, ...]:
    """Return .py files of the standard library and then of torch, up to `size` bytes, without tests, sorted by path.

    Files of torch are chosen by a hash of their names, so that they come from the whole library.
    """
    library, torch = Path(sysconfig.get_path("stdlib")), _torch_folder()
    scattered = sorted(_sources(torch), key=lambda path: _name_hash(path.relative_to(torch)))
    chosen: list[Path] = []
    for path in _sources(library) + scattered:
        size -= path.stat().st_size
        if size < 0:
            break
        chosen.append(path)
    return tuple(sorted(chosen))


def described_functions(path: Path) -> Iterator[tuple[str, str]]:
    """For each short function that has a docstring, yield a question, and the source without the docstring.

    Yields nothing for a file that this Python version cannot parse.
    """
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node)
        lines_of_function = node.end_lineno - node.lineno
        if docstring is None or len(docstring) < SHORTEST_DOCSTRING or lines_of_function >= LONGEST_FUNCTION:
            continue
        statement = node.body[0]
        head = lines[node.lineno - 1 : statement.lineno - 1]
        source_lines = head + lines[statement.end_lineno : node.end_lineno]
        question = f"Write the Python function `{node.name}`. {docstring}"
        yield question, textwrap.dedent("\n".join(source_lines)).strip("\n")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch has no folder of sources")
    return Path(spec.origin).parent


def _sources(root: Path) -> list[Path]:
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - SKIPPED)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _name_hash(path: Path) -> bytes:
    return hashlib.blake2b(path.as_posix().encode()).digest()
