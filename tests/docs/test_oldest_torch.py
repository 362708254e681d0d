"""Names of torch that the source uses exist in the oldest supported version, which CI does not install.

`torch_2_11.txt` has the names that were found in it. A new one is to be tried there (pip install torch==2.11.0) before
it is added: `python tests/docs/test_oldest_torch.py` says what the torch at hand does not have, and writes the list.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("torch_2_11.txt")


def used() -> set[str]:
    """`torch.nn.functional.linear` for `from torch.nn.functional import linear` or where it stands so. Left out is what
    is tried and done without, and operations."""
    return {name for file in (ROOT / "src").rglob("*.py") for name in names_in(ast.parse(file.read_text()))}


def names_in(file: ast.AST) -> Iterator[str]:
    own = dict(short_names(file))
    waiting = [file]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Try) and any(
            handler.type and is_for_absence(handler.type) for handler in node.handlers
        ):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (path := ast.unparse(node)).replace(".", "").isidentifier():
            first, _, rest = path.partition(".")
            if first in own and not (path := f"{own[first]}.{rest}").startswith("torch.ops."):
                yield path
            continue
        waiting += ast.iter_child_nodes(node)


def short_names(file: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the short names of torch modules in a file, such as `nn`, `F` and `dist`, with their full names."""
    for node in ast.walk(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    yield alias.asname or "torch", alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((alias.asname or alias.name, f"torch.{alias.name}") for alias in node.names)


def is_for_absence(caught: ast.expr) -> bool:
    return any(name in ast.unparse(caught) for name in ("ImportError", "AttributeError", "ModuleNotFoundError"))


def is_there(name: str) -> bool:
    found: Any = torch
    path = name.split(".")
    for place, part in enumerate(path[1:], start=2):
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(path[:place]))
        except ImportError:
            return False
    return True


def test_used_names_of_torch_exist_in_the_oldest_version() -> None:
    new = used() - set(LIST.read_text().split())
    assert not new, f"to be tried with torch 2.11: {', '.join(sorted(new))}"


@pytest.mark.slow
def test_it_is_there_in_this_version() -> None:
    assert not [name for name in sorted(used()) if not is_there(name)]


if __name__ == "__main__":
    missing = [name for name in sorted(used()) if not is_there(name)]
    LIST.write_text("".join(f"{name}\n" for name in sorted(used() - {*missing})))
    sys.exit(f"missing: {', '.join(missing)}" if missing else 0)
