"""Execute notebooks and store their outputs: python tools/run_notebooks.py examples/notebooks/*.ipynb

Requires the extra `examples`. A notebook stores the hash of the code that made its outputs.
"""

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

LONGEST = 300
"""Time limit of a cell in seconds."""


def source_hash(notebook: dict[str, Any]) -> str:
    """Return the sha256 of the code cells of a notebook."""
    return hashlib.sha256(json.dumps(code_cells(notebook)).encode()).hexdigest()


def code_cells(notebook: dict[str, Any]) -> list[str]:
    """Return the text of each code cell."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: Path, folder: Path) -> dict[str, Any]:
    """Execute a notebook in a new kernel with the working folder `folder`, and return the notebook with its outputs.

    Standard error, times, addresses of objects and random identifiers are left out. Raises CellExecutionError if a cell
    raises.
    """
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=LONGEST, kernel_name="python3", resources=resources, record_timing=False).execute()
    for number, cell in enumerate(content.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for data in (each.data for each in cell.outputs if "data" in each):
                data.update({kind: re.sub(r" at 0x[0-9a-f]+", "", text) for kind, text in data.items()})
    language = {"name": "python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content.metadata = {"kernelspec": kernel, "language_info": language, "source_hash": source_hash(content)}
    return content


def main(paths: list[str]) -> None:
    import nbformat

    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
