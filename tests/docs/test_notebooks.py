"""Notebooks: their code runs, and their stored outputs are outputs of that code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tools.run_notebooks import code_cells, execute, source_hash

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
LARGEST = 300_000
"""Maximum size of a notebook with its outputs in bytes."""

every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)


def output_kinds(content: dict[str, Any]) -> list[list[tuple[str, ...]]]:
    """Return the types of each output of each code cell: "stream", or MIME types."""
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    return [[tuple(sorted(each.get("data", {each["output_type"]: 0}))) for each in cell["outputs"]] for cell in cells]


@every_notebook
def test_stored_outputs_belong_to_the_stored_code(notebook: Path) -> None:
    """A notebook without outputs is fine too."""
    text = notebook.read_text(encoding="utf-8")
    content = json.loads(text)
    kinds = {kind for outputs in output_kinds(content) for output in outputs for kind in output}
    own = content["metadata"].get("source_hash")
    assert own == (source_hash(content) if kinds else None), f"run: python tools/run_notebooks.py {notebook}"
    assert "error" not in kinds and len(text) < LARGEST and not re.search(r"/(tmp|root|home)/", text)


@every_notebook
def test_a_notebook_begins_with_a_title_and_packages(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    first = "".join(cells[0]["source"])
    assert first.startswith("# ") and "Install: `pip install" in first
    links = re.findall(r"\]\((?!http)([^)]+)\)", "".join("".join(c["source"]) for c in cells))
    assert all((notebook.parent / link).exists() for link in links), links


@pytest.mark.slow
@every_notebook
def test_every_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    code = "\n".join(code_cells(stored))
    for package in ("nbclient", "ipykernel", *re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE)):
        pytest.importorskip(package, reason=f"{package} is missing: pip install -e '.[test,examples]'")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "desk").mkdir()
    kinds = output_kinds(execute(notebook, tmp_path / "desk"))
    assert any(kinds) and ("source_hash" not in stored["metadata"] or kinds == output_kinds(stored))
