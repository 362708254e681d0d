"""What every machine has: the Python sources of the running standard library and of torch, as they are, and as
functions with what their docstrings ask for."""

import ast
import hashlib
import importlib.util
import os
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

SIZE = 40_000_000
"""Bytes of source text taken at most."""
SAYS_ENOUGH = 40
"""Characters of a docstring from which on it asks for a function."""
LONGEST_FUNCTION = 60
"""Lines."""
PASSED_OVER = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def python_files(size: int = SIZE) -> tuple[Path, ...]:
    """The standard library's .py files and then torch's, up to `size` bytes, without tests; sorted by path.

    Torch's are taken in the order of a hash of their names, so that the cut spreads over the whole library.
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
    """The functions of a file that are short and say in a docstring what they do: what asks for each, and its source
    without the docstring. A file that this Python cannot parse has none."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2 or node.end_lineno is None:
            continue
        said = ast.get_docstring(node)
        if said is None or len(said) < SAYS_ENOUGH or node.end_lineno - node.lineno >= LONGEST_FUNCTION:
            continue
        described = node.body[0]
        head = lines[node.lineno - 1 : described.lineno - 1]
        body = lines[described.end_lineno : node.end_lineno]
        yield f"Write the Python function `{node.name}`. {said}", textwrap.dedent("\n".join(head + body)).strip("\n")


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch has no folder of sources")
    return Path(spec.origin).parent


def _sources(root: Path) -> list[Path]:
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(set(inner) - PASSED_OVER)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _name_hash(path: Path) -> bytes:
    return hashlib.blake2b(path.as_posix().encode()).digest()
